//! Whether a server on this machine answers: one HTTP request, by TLS or
//! without.
//!
//! Written out and not a client library's: a probe wants a fresh connection
//! each time, reads one status line and a few bytes of why, and must be
//! bounded in all of that. The bound in time is the caller's.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Why a probe does not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwell {
    /// The program itself says so; otherwise it says nothing.
    pub answered: bool,
    /// For an operator.
    pub why: String,
}

impl Unwell {
    /// There is no answer.
    pub fn silent(why: impl Into<String>) -> Self {
        Self {
            answered: false,
            why: why.into(),
        }
    }

    /// An answer that is none that was hoped for.
    pub fn says(why: impl Into<String>) -> Self {
        Self {
            answered: true,
            why: why.into(),
        }
    }
}

/// As much of an answer is read.
const LONGEST: u64 = 4096;
/// As much of it is told on.
const SHOWN: usize = 300;

/// Asks without TLS; well if the answer is 200.
pub async fn http(address: SocketAddr, path: &str) -> Result<(), Unwell> {
    let stream = connect(address).await?;
    ask(stream, &address.to_string(), path).await
}

/// Asks by TLS as the configuration says; well if the answer is 200.
pub async fn https(
    address: SocketAddr,
    name: ServerName<'static>,
    path: &str,
    config: Arc<ClientConfig>,
) -> Result<(), Unwell> {
    let stream = connect(address).await?;
    let host = name.to_str().into_owned();
    let stream = TlsConnector::from(config).connect(name, stream).await;
    let stream = stream.map_err(|error| Unwell::silent(format!("TLS with {address}: {error}")))?;
    ask(stream, &host, path).await
}

async fn connect(address: SocketAddr) -> Result<TcpStream, Unwell> {
    let stream = TcpStream::connect(address).await;
    stream.map_err(|error| Unwell::silent(format!("connect to {address}: {error}")))
}

async fn ask(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    host: &str,
    path: &str,
) -> Result<(), Unwell> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let broken = |error| Unwell::silent(format!("GET {path}: {error}"));
    stream.write_all(request.as_bytes()).await.map_err(broken)?;
    stream.flush().await.map_err(broken)?;
    let mut answer = Vec::new();
    // A server that ends a connection roughly has answered all the same.
    let read = stream.take(LONGEST).read_to_end(&mut answer).await;
    if answer.is_empty() {
        read.map_err(broken)?;
    }
    judge(path, &String::from_utf8_lossy(&answer))
}

fn judge(path: &str, answer: &str) -> Result<(), Unwell> {
    let (status, rest) = answer.split_once("\r\n").unwrap_or((answer, ""));
    if status.starts_with("HTTP/") && status.split(' ').nth(1) == Some("200") {
        return Ok(());
    }
    let body = rest.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let told = format!("{status} {body}");
    let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
    let told: String = told.chars().take(SHOWN).collect();
    Err(Unwell::says(format!("GET {path}: {told}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn only_200_is_well() {
        assert_eq!(judge("/x", "HTTP/1.1 200 OK\r\n\r\nok"), Ok(()));
        let refused = judge(
            "/x",
            "HTTP/1.1 500 Internal\r\na: b\r\n\r\n[-]etcd failed\n[+]ping ok\n",
        );
        assert_eq!(
            refused.unwrap_err(),
            Unwell::says("GET /x: HTTP/1.1 500 Internal [-]etcd failed [+]ping ok")
        );
        assert!(judge("/x", "").is_err());
        assert!(judge("/x", "SSH-2.0 200").is_err());
    }

    #[tokio::test]
    async fn a_server_is_asked() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut seen = [0; 512];
            let length = stream.read(&mut seen).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            String::from_utf8_lossy(&seen[..length]).into_owned()
        };
        let (answer, seen) = tokio::join!(http(address, "/healthz"), serve);
        assert_eq!(answer, Ok(()));
        assert!(seen.starts_with("GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:"));
        drop(listener);
        let silent = http(address, "/healthz").await.unwrap_err();
        assert!(
            !silent.answered && silent.why.contains("connect"),
            "{silent:?}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_answer_is_judged(answer: String) {
            if let Err(Unwell { why, .. }) = judge("/x", &answer) {
                prop_assert!(why.chars().count() <= SHOWN + 10);
            }
        }
    }
}
