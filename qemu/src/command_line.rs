//! A command line, and the option lists that QEMU's arguments consist of.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::{fmt, process};

/// A program and its arguments. `Display` prints them as one line that a shell parses into the same arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    program: OsString,
    args: Vec<OsString>,
}

impl CommandLine {
    /// A command line without arguments.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
        }
    }

    /// Adds one argument unchanged.
    pub fn arg(&mut self, arg: impl Into<OsString>) -> &mut Self {
        self.args.push(arg.into());
        self
    }

    /// Adds an option and its value.
    pub fn option(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.arg(name).arg(value)
    }

    /// The program.
    pub fn program(&self) -> &OsStr {
        &self.program
    }

    /// The arguments.
    pub fn args(&self) -> &[OsString] {
        &self.args
    }

    /// The values of all options of this name.
    pub fn values_of(&self, name: &str) -> Vec<&OsStr> {
        self.args
            .windows(2)
            .filter(|pair| pair[0] == name)
            .map(|pair| pair[1].as_os_str())
            .collect()
    }

    /// As a process that can be spawned.
    pub fn to_std(&self) -> process::Command {
        let mut command = process::Command::new(&self.program);
        command.args(&self.args);
        command
    }

    /// As a shell script: one option and its value per line.
    pub fn to_script(&self) -> Vec<u8> {
        let mut script = quoted(&self.program);
        for (index, arg) in self.args.iter().enumerate() {
            let is_option = arg.as_bytes().starts_with(b"-");
            let after_option = index > 0 && self.args[index - 1].as_bytes().starts_with(b"-");
            if is_option || !after_option {
                script.extend_from_slice(b" \\\n ");
            }
            script.push(b' ');
            script.extend_from_slice(&quoted(arg));
        }
        script.push(b'\n');
        script
    }
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&quoted(&self.program)))?;
        for arg in &self.args {
            write!(f, " {}", String::from_utf8_lossy(&quoted(arg)))?;
        }
        Ok(())
    }
}

/// Quotes `word` for a POSIX shell.
fn quoted(word: &OsStr) -> Vec<u8> {
    let bytes = word.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_=.,:/+@%".contains(byte);
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return bytes.to_vec();
    }
    let mut quoted = vec![b'\''];
    for &byte in bytes {
        if byte == b'\'' {
            // Closes the quotes, adds one escaped quote, and opens them again.
            quoted.extend_from_slice(br"'\''");
        } else {
            quoted.push(byte);
        }
    }
    quoted.push(b'\'');
    quoted
}

/// The value of one QEMU option: `driver,key=value,…`. Commas in values are doubled, which is QEMU's escaping
/// everywhere except in `-append`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options(Vec<u8>);

impl Options {
    /// A list that starts with a bare word, such as the driver.
    pub(crate) fn of(first: &str) -> Self {
        let mut options = Self::default();
        options.escaped(first.as_bytes());
        options
    }

    /// A list that starts with a pair.
    pub(crate) fn with(key: &str, value: impl AsRef<OsStr>) -> Self {
        Self::default().set(key, value)
    }

    pub(crate) fn set(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        if !self.0.is_empty() {
            self.0.push(b',');
        }
        self.0.extend_from_slice(key.as_bytes());
        self.0.push(b'=');
        self.escaped(value.as_ref().as_bytes());
        self
    }

    pub(crate) fn path(self, key: &str, path: &Path) -> Self {
        self.set(key, path)
    }

    pub(crate) fn on(self, key: &str, on: bool) -> Self {
        self.set(key, if on { "on" } else { "off" })
    }

    fn escaped(&mut self, value: &[u8]) {
        for &byte in value {
            if byte == b',' {
                self.0.push(b',');
            }
            self.0.push(byte);
        }
    }
}

impl From<Options> for OsString {
    fn from(options: Options) -> Self {
        OsString::from_vec(options.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn commas_in_values_are_doubled() {
        let value: OsString = Options::of("file")
            .path("path", Path::new("/a,b/c"))
            .on("append", true)
            .into();
        assert_eq!(value, "file,path=/a,,b/c,append=on");
    }

    #[test]
    fn a_line_is_quoted_where_it_must_be() {
        let mut line = CommandLine::new("qemu");
        line.option("-append", "quiet x='1'").arg("");
        assert_eq!(line.to_string(), r"qemu -append 'quiet x='\''1'\''' ''");
    }

    #[test]
    fn options_are_found_by_name() {
        let mut line = CommandLine::new("qemu");
        line.option("-device", "a")
            .arg("-nodefaults")
            .option("-device", "b");
        assert_eq!(line.values_of("-device"), ["a", "b"]);
        assert!(line.values_of("-drive").is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// A real shell parses both forms into the original arguments.
        #[test]
        fn a_shell_reads_the_line_back(args in proptest::collection::vec("-?[ -~\n\t]{0,12}", 0..5)) {
            let mut line = CommandLine::new("printf");
            line.arg("%s\\0");
            for arg in &args {
                line.arg(arg);
            }
            let wanted: Vec<u8> = args.iter().flat_map(|arg| [arg.as_bytes(), b"\0"].concat()).collect();
            for script in [line.to_string().into_bytes(), line.to_script()] {
                let output = process::Command::new("sh")
                    .arg("-c")
                    .arg(OsString::from_vec(script))
                    .output()
                    .expect("sh runs");
                // printf without arguments prints the format once.
                let wanted = if args.is_empty() { b"\0".to_vec() } else { wanted.clone() };
                prop_assert_eq!(output.stdout, wanted);
            }
        }
    }
}
