//! The host's resolvers.
//!
//! They are those of its resolv.conf, which other programs rewrite whenever the host's network changes, so the file is
//! read again when it is another one. Resolvers on the host's loopback work: it is the host that asks them.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::{fs, io};

use super::DNS;

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Further ones are ignored by other programs, too.
const MOST: usize = 3;

/// What shows that a file is another one than before.
type Version = (u64, u64, i64, i64);

/// The resolvers.
#[derive(Debug)]
pub(crate) enum Resolvers {
    /// Those of the options.
    Fixed(Vec<SocketAddr>),
    /// Those of the host.
    Host(ResolvConf),
}

/// The file with the host's resolvers, and what it said when it was last read.
#[derive(Debug)]
pub(crate) struct ResolvConf {
    path: PathBuf,
    version: Option<Version>,
    servers: Vec<SocketAddr>,
}

impl Resolvers {
    pub(crate) fn new(fixed: Option<Vec<SocketAddr>>) -> Self {
        match fixed {
            Some(servers) => Self::Fixed(servers),
            None => Self::Host(ResolvConf::at(RESOLV_CONF.into())),
        }
    }

    /// The present ones, in the order in which they are asked.
    pub(crate) fn present(&mut self) -> Vec<SocketAddr> {
        match self {
            Self::Fixed(servers) => servers.clone(),
            Self::Host(file) => file.present().to_vec(),
        }
    }
}

impl ResolvConf {
    fn at(path: PathBuf) -> Self {
        Self {
            path,
            // Read at the first use, even if there is no file.
            version: Some(Version::default()),
            servers: Vec::new(),
        }
    }

    fn present(&mut self) -> &[SocketAddr] {
        let metadata = fs::metadata(&self.path).ok();
        let version =
            metadata.map(|file| (file.dev(), file.ino(), file.mtime(), file.mtime_nsec()));
        if version != self.version {
            self.version = version;
            self.read();
        }
        &self.servers
    }

    fn read(&mut self) {
        let path = self.path.display();
        let text = fs::read(&self.path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        match &text {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%path, %error, "cannot read the host's resolvers");
            }
            _ => {}
        }
        self.servers = parse(&text.unwrap_or_default());
        match self.servers.is_empty() {
            true => {
                tracing::warn!(%path, "the host has no resolvers: DNS queries of machines are not answered")
            }
            false => tracing::info!(servers = ?self.servers, "resolvers of the host"),
        }
    }
}

/// The addresses of the `nameserver` lines; others, and those with a zone, are left out.
fn parse(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then_some(())?;
        words.next()?.parse::<IpAddr>().ok()
    };
    let addresses = text.lines().filter_map(address).take(MOST);
    addresses
        .map(|address| SocketAddr::new(address, DNS))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read_and_all_else_is_not() {
        let text = "# nameserver 192.0.2.1\n; x\nsearch example\n nameserver\t127.0.0.53 # local\n\
            nameserver fe80::1%eth0\nnameserver ::1\noptions edns0\nnameservers 192.0.2.2\n\
            nameserver\nnameserver 192.0.2.3\nnameserver 192.0.2.4";
        let found: Vec<String> = parse(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.53:53", "[::1]:53", "192.0.2.3:53"]);
        assert!(parse("").is_empty());
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("resolv.conf");
        let mut file = ResolvConf::at(path.clone());
        assert!(file.present().is_empty());
        let replace = |text: &str| {
            let partial = folder.path().join("partial");
            fs::write(&partial, text).expect("written");
            fs::rename(&partial, &path).expect("renamed");
        };
        replace("nameserver 192.0.2.1\n");
        assert_eq!(file.present().len(), 1);
        replace("nameserver 192.0.2.1\nnameserver 192.0.2.2\n");
        assert_eq!(file.present().len(), 2);
        fs::remove_file(&path).expect("removed");
        assert!(file.present().is_empty());
    }
}
