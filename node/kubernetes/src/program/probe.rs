//! Health probes over HTTP.
//!
//! With TLS a [`Client`] is used, which keeps its connection: a handshake costs both sides more
//! than the request, and a starting program is probed several times per second. Without TLS a
//! minimal request is implemented here, which reads the status line and a part of the body.
//! Timeouts are the caller's.

use std::net::SocketAddr;

use hearth_kubernetes_api::{ApiError, Client};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Why a probe has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeFailure {
    /// The program has answered that it is unhealthy; otherwise it has not answered.
    pub answered: bool,
    /// The reason, for operators.
    pub why: String,
}

impl ProbeFailure {
    /// There was no answer.
    pub fn silent(why: impl Into<String>) -> Self {
        Self {
            answered: false,
            why: why.into(),
        }
    }

    /// The program has answered that it is unhealthy.
    pub fn says(why: impl Into<String>) -> Self {
        Self {
            answered: true,
            why: why.into(),
        }
    }
}

/// How much of an answer is read.
const MAX_ANSWER_BYTES: u64 = 4096;
/// How much of it is reported.
const MAX_SHOWN_CHARS: usize = 300;

/// Probes without TLS; succeeds if the status is 200.
pub async fn http(address: SocketAddr, path: &str) -> Result<(), ProbeFailure> {
    let stream = TcpStream::connect(address).await;
    let mut stream = stream
        .map_err(|error| ProbeFailure::silent(format!("cannot connect to {address}: {error}")))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let broken = |error| ProbeFailure::silent(format!("GET {path}: {error}"));
    stream.write_all(request.as_bytes()).await.map_err(broken)?;
    stream.flush().await.map_err(broken)?;
    let mut answer = Vec::new();
    // A connection reset after the answer does not matter.
    let read = stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await;
    if answer.is_empty() {
        read.map_err(broken)?;
    }
    judge(path, &String::from_utf8_lossy(&answer))
}

/// Probes with TLS; succeeds if the status is a success.
pub async fn https(client: &Client, path: &str) -> Result<(), ProbeFailure> {
    let answer = client.text(path).await;
    answer.map(drop).map_err(|error| {
        let why = format!("GET {path}: {}", hearth_api::chain(&error));
        match error {
            ApiError::Refused { .. } => ProbeFailure::says(words(&why)),
            _ => ProbeFailure::silent(why),
        }
    })
}

fn judge(path: &str, answer: &str) -> Result<(), ProbeFailure> {
    let (status, rest) = answer.split_once("\r\n").unwrap_or((answer, ""));
    if status.starts_with("HTTP/") && status.split(' ').nth(1) == Some("200") {
        return Ok(());
    }
    let body = rest.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let told = words(&format!("{status} {body}"));
    Err(ProbeFailure::says(format!("GET {path}: {told}")))
}

/// The text as one line of limited length.
fn words(told: &str) -> String {
    let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
    told.chars().take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::{TcpListener, TcpSocket};

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
            ProbeFailure::says("GET /x: HTTP/1.1 500 Internal [-]etcd failed [+]ping ok")
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
        // Bound, it refuses, and no other test gets its port.
        let unheard = TcpSocket::new_v4().unwrap();
        unheard.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let nobody = unheard.local_addr().unwrap();
        let silent = http(nobody, "/healthz").await.unwrap_err();
        assert!(
            !silent.answered && silent.why.contains("connect"),
            "{silent:?}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_answer_is_judged(answer: String) {
            if let Err(ProbeFailure { why, .. }) = judge("/x", &answer) {
                prop_assert!(why.chars().count() <= MAX_SHOWN_CHARS + 10);
            }
        }
    }
}
