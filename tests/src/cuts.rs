//! Power cuts at failpoints, a test for each.

/// The node's list of failpoints with this name, from its source: a failpoint that is added to the node has to be
/// tested, too.
pub fn listed(list: &str) -> Vec<&'static str> {
    let source = include_str!("../../node/host/src/failpoint.rs");
    let begin = format!("pub const {list}: &[&str] = &[");
    let rest = source.split_once(&begin).map(|(_, rest)| rest);
    let list = rest.and_then(|rest| rest.split_once("];"));
    let (list, _) = list.unwrap_or_default();
    list.split('"').skip(1).step_by(2).collect()
}

/// Tests that run `$story` at each of these failpoints, and one that checks that none of
/// `$list` is left out. `CUTS` has all of them, in their order.
#[macro_export]
macro_rules! cuts {
    ($story:ident at all of $list:literal {
        $($(#[$attribute:meta])* $test:ident at $failpoint:literal;)*
    }) => {
        $(
            #[tokio::test]
            $(#[$attribute])*
            async fn $test() -> $crate::Outcome {
                $story($crate::here!(), $failpoint).await
            }
        )*

        const CUTS: &[&str] = &[$($failpoint),*];

        #[test]
        fn no_failpoint_is_left_out() {
            assert_eq!(CUTS, $crate::cuts::listed($list));
        }
    };
}

#[cfg(test)]
mod tests {
    use super::listed;

    #[test]
    fn lists_are_found_in_the_source() {
        assert!(listed("BOOTSTRAP").len() > 10);
        assert_eq!(listed("NO_SUCH_LIST"), Vec::<&str>::new());
    }
}
