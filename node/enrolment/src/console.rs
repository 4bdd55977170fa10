//! Asks the owner at the console of the machine.
//!
//! Used where the node waits for a key that its owner can give ([`hearth_api::recovery::console`]). Whoever presses Enter
//! is shown the challenge, and what is entered then is tried as the answer. Nothing but a hint is shown unasked: most
//! nodes that wait get their keys from their cluster a moment later.

use std::future::pending;
use std::io;
use std::path::Path;
use std::time::Duration;

use hearth_sys::console::{Console, Input};

/// Delay before the terminal is opened again after the end of its input.
const REOPEN: Duration = Duration::from_secs(1);

/// Why an answer was not accepted, as it is shown.
pub(super) type Refusal = String;

/// Asks at this console until an answer is accepted. `wants` says what the answer is good for, as a
/// verb phrase. A machine without a console waits for ever.
pub(super) async fn ask<F>(
    device: &Path,
    wants: &str,
    challenge: &str,
    mut accept: impl FnMut(String) -> F,
) where
    F: Future<Output = Result<(), Refusal>>,
{
    let open = || -> io::Result<_> { Ok((Console::open(device)?, Input::open(device)?)) };
    let mut opened = open();
    loop {
        let (console, input) = match &mut opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::info!("cannot ask at the console {}: {error}", device.display());
                return pending().await;
            }
        };
        console.line(&format!(
            "To {wants} with the recovery key, press Enter here."
        ));
        while let Ok(line) = input.line().await {
            if line.trim().is_empty() {
                console.line("Pass the next line to `hearthctl owner answer`, and enter here what it prints:");
                console.line(challenge);
                continue;
            }
            match accept(line).await {
                Ok(()) => return console.line("The answer was accepted."),
                Err(refusal) => console.line(&format!("The answer was not accepted: {refusal}")),
            }
        }
        // Somebody has pressed Ctrl-D, or the terminal was hung up, and may be again at once.
        tokio::time::sleep(REOPEN).await;
        opened = open();
    }
}
