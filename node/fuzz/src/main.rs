//! libFuzzer around one target, which `HEARTH_FUZZ_TARGET` names; the arguments are libFuzzer's. `cargo xtask fuzz`
//! compiles and runs it.
#![no_main]

use std::sync::LazyLock;

use hearth_fuzz::Target;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("HEARTH_FUZZ_TARGET").unwrap_or_default();
    Target::named(&name).unwrap_or_else(|| panic!("HEARTH_FUZZ_TARGET: no target {name:?}"))
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| TARGET.run(input));
