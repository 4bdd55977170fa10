//! Where people see the installer and answer it: the console of the machine, and its screen and keyboard where the console
//! is a serial line.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use hearth_api::console::Report;
use hearth_host::console::report;
use hearth_sys::console::{self, Console, Input};
use hearth_sys::screen;

/// The terminals that the kernel's console consists of; the last one is [`console::DEVICE`].
const ACTIVE: &str = "/sys/class/tty/console/active";
/// Delay before the terminals are opened again after the end of their input.
const REOPEN: Duration = Duration::from_secs(1);

/// The screen, if it shows something else than the console.
#[derive(Debug)]
pub(crate) struct Mirror(Option<Console>);

impl Mirror {
    pub(crate) fn open() -> Self {
        let screen = Path::new(screen::DEVICE);
        Self(is_separate().then(|| Console::open(screen).ok()).flatten())
    }

    /// Tells programs on the console, and people in front of the screen.
    pub(crate) fn tell(&self, what: &Report) {
        report(what);
        if let Some(screen) = &self.0 {
            screen.line(&what.to_string());
        }
    }

    /// Tells people.
    pub(crate) fn say(&self, line: &str) {
        // As the log: the console may be slow, and must not hold up anything.
        println!("{line}");
        if let Some(screen) = &self.0 {
            screen.line(line);
        }
    }
}

/// Whether the machine's screen is not its console.
fn is_separate() -> bool {
    let active = fs::read_to_string(ACTIVE).unwrap_or_default();
    active.split_whitespace().last() != Some("tty0")
}

/// The keyboards at both.
pub(crate) struct Keyboards {
    devices: Vec<PathBuf>,
    inputs: Vec<Input>,
}

impl Keyboards {
    pub(crate) fn open() -> Self {
        let mut devices = vec![PathBuf::from(console::DEVICE)];
        if is_separate() {
            devices.push(screen::DEVICE.into());
        }
        let inputs = open(&devices);
        Self { devices, inputs }
    }

    /// The next line that is typed at one of them. Waits for ever where there is none.
    pub(crate) async fn line(&mut self) -> String {
        loop {
            let typed: io::Result<String> = match &mut self.inputs[..] {
                [] => {
                    tracing::warn!("cannot ask: the machine has neither a console nor a screen");
                    pending().await
                }
                [one] => one.line().await,
                [one, other, ..] => tokio::select! {
                    line = one.line() => line,
                    line = other.line() => line,
                },
            };
            if let Ok(line) = typed {
                return line;
            }
            // Somebody has pressed Ctrl-D, or a terminal was hung up, and may be again at once.
            tokio::time::sleep(REOPEN).await;
            self.inputs = open(&self.devices);
        }
    }
}

fn open(devices: &[PathBuf]) -> Vec<Input> {
    let opened = devices.iter().map(|device| Input::open(device));
    opened.filter_map(Result::ok).collect()
}
