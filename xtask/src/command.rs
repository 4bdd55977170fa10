//! External commands and interrupts, which the tasks take from `hearth-build`; and the detection of interrupts in error
//! chains.

pub(crate) use hearth_build::command::{Cmd, find_program};
pub(crate) use hearth_build::interrupt::{
    INTERRUPTED_EXIT_CODE, Interrupted, Interrupts, check_interrupt, handle_interrupts,
};

/// Whether an interrupt is among the causes of this error.
pub(crate) fn is_interrupt(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<Interrupted>())
}

#[cfg(test)]
mod tests {
    use hearth_build::cache::CacheError;
    use hearth_build::command::CommandError;

    use super::*;

    #[test]
    fn an_interrupt_is_found_below_what_it_interrupted() {
        let within = hearth_bundle::BuildError::from(CacheError::from(Interrupted));
        for error in [
            anyhow::Error::from(Interrupted),
            CommandError::from(Interrupted).into(),
            anyhow::Error::from(within).context("no bundle"),
        ] {
            assert!(is_interrupt(&error), "{error:?}");
        }
        assert!(!is_interrupt(&anyhow::anyhow!("interrupted")));
    }
}
