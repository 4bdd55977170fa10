//! Unpredictable numbers from the kernel.

/// A number that nobody else can guess.
pub fn number() -> u64 {
    let mut bytes = [0; 8];
    // Cannot fail for so few bytes once the pool is initialised, which the kernel waits for. If it
    // did, the number could be guessed.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
