//! Against servers that answer as the providers' documentation says.
//!
//! EC2: "Retrieve instance metadata" and "Work with instance user data" in the Amazon EC2 User Guide.
//! Google: "View and query VM metadata" in the Compute Engine documentation.

use std::cell::RefCell;
use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hearth_api::fixture;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

const RIGHT: &[u8] = fixture!("parameters-register.pb");
/// With a static address.
const WITH_NETWORK: &[u8] = fixture!("parameters-bootstrap-recovery.pb");
const TOKEN: &str = "AQAEAPj2pPGr0bSMaPRWLtLuGuYFYrmTnnLwxmNKd8cLmdDz3RA==";

/// A server that answers each request by `answer`, and ends connections as a server may.
struct Server {
    address: SocketAddr,
    _task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self._task.abort();
    }
}

impl Server {
    async fn start(mut answer: impl FnMut(&str) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        #[allow(clippy::disallowed_methods, reason = "aborted with the server")]
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                let request = String::from_utf8(request).unwrap();
                // The client may have heard enough.
                drop(stream.write_all(&answer(&request)).await);
            }
        });
        Self {
            address,
            _task: task,
        }
    }

    async fn load(&self, cloud: Cloud) -> Loaded {
        load_from(self.address, cloud, PAUSES, |_| {}).await
    }

    /// The message of what cannot be used.
    async fn refusal(&self, cloud: Cloud) -> String {
        self.load(cloud).await.unwrap_err().to_string()
    }
}

fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

fn has_header(request: &str, wanted: &str) -> bool {
    let mut lines = request.lines();
    lines.any(|line| line.eq_ignore_ascii_case(wanted))
}

/// IMDSv2 of an instance with this user data: without a token it answers 401.
async fn ec2(user_data: Option<Vec<u8>>) -> Server {
    Server::start(move |request| {
        const PLAIN: &str = "Content-Type: text/plain\r\nServer: EC2ws\r\n";
        assert!(has_header(request, "host: 169.254.169.254"), "{request}");
        let path = request.lines().next().unwrap();
        match path {
            "PUT /latest/api/token HTTP/1.1" => {
                let lifetime = "x-aws-ec2-metadata-token-ttl-seconds: 60";
                match has_header(request, lifetime) {
                    true => answer("200 OK", PLAIN, TOKEN.as_bytes()),
                    false => answer("400 Bad Request", PLAIN, b""),
                }
            }
            "GET /latest/user-data HTTP/1.1" => {
                if !has_header(request, &format!("x-aws-ec2-metadata-token: {TOKEN}")) {
                    return answer("401 Unauthorized", PLAIN, b"");
                }
                match &user_data {
                    Some(data) => answer(
                        "200 OK",
                        "Content-Type: application/octet-stream\r\nAccept-Ranges: bytes\r\n",
                        data,
                    ),
                    None => answer("404 Not Found", "Content-Type: text/html\r\n", b"<?xml"),
                }
            }
            other => panic!("{other}"),
        }
    })
    .await
}

/// The metadata server of an instance with this attribute: without the header it answers 403.
async fn google(attribute: Option<Vec<u8>>) -> Server {
    Server::start(move |request| {
        const GOOGLE: &str = "Metadata-Flavor: Google\r\nServer: Metadata Server for VM\r\n\
                              X-XSS-Protection: 0\r\nX-Frame-Options: SAMEORIGIN\r\n";
        let path = request.lines().next().unwrap();
        let attributes = "/computeMetadata/v1/instance/attributes/";
        assert_eq!(path, format!("GET {attributes}hearth-parameters HTTP/1.1"));
        assert!(has_header(request, "host: metadata.google.internal"));
        if !has_header(request, "metadata-flavor: Google") {
            return answer("403 Forbidden", GOOGLE, b"");
        }
        match &attribute {
            Some(text) => {
                let headers =
                    format!("{GOOGLE}Content-Type: application/text\r\nETag: 411261ca6c9e4f1a\r\n");
                answer("200 OK", &headers, text)
            }
            None => answer("404 Not Found", GOOGLE, b"<!DOCTYPE html>"),
        }
    })
    .await
}

#[tokio::test]
async fn both_clouds_give_parameters_and_say_that_there_are_none() {
    let text = STANDARD.encode(RIGHT).into_bytes();
    let lines: Vec<u8> = text
        .chunks(76)
        .flat_map(|line| [line, b"\n"].concat())
        .collect();
    for (server, cloud) in [
        (ec2(Some(RIGHT.to_vec())).await, Cloud::Ec2),
        (google(Some(text)).await, Cloud::Google),
        (google(Some(lines)).await, Cloud::Google),
    ] {
        let found = server.load(cloud).await.unwrap().unwrap();
        assert_eq!(found.source, Source::Cloud(cloud));
    }
    assert!(ec2(None).await.load(Cloud::Ec2).await.unwrap().is_none());
    let none = google(None).await.load(Cloud::Google).await;
    assert!(none.unwrap().is_none());
}

#[tokio::test]
async fn what_is_there_and_bad_is_an_error_with_its_source() {
    let script = ec2(Some(b"#cloud-config\n".to_vec())).await;
    let error = script.refusal(Cloud::Ec2).await;
    assert!(
        error.starts_with("parameters from EC2 user data: "),
        "{error}"
    );
    // The text form is that of another cloud.
    let text = STANDARD.encode(RIGHT).into_bytes();
    let error = ec2(Some(text)).await.refusal(Cloud::Ec2).await;
    assert!(
        error.starts_with("parameters from EC2 user data: "),
        "{error}"
    );
    let error = google(Some(RIGHT.to_vec()))
        .await
        .refusal(Cloud::Google)
        .await;
    let from = "parameters from Google Cloud attribute hearth-parameters: ";
    assert!(
        error.starts_with(&format!("{from}expected base64")),
        "{error}"
    );
    // A machine that has fetched them with one address does not change to another.
    let network = ec2(Some(WITH_NETWORK.to_vec())).await;
    assert_eq!(
        network.refusal(Cloud::Ec2).await,
        "parameters from EC2 user data: network_config: expected none, because they were fetched \
         with what DHCP has configured"
    );
    let empty = google(Some(Vec::new())).await.refusal(Cloud::Google).await;
    assert!(empty.starts_with(&format!("{from}empty")), "{empty}");
    let large = ec2(Some(vec![b'x'; LONGEST + 1])).await;
    let error = large.refusal(Cloud::Ec2).await;
    assert!(
        error.contains("too large: expected at most 393216 bytes"),
        "{error}"
    );
    // As much as the answer may have, and more than parameters may.
    let large = ec2(Some(vec![b'x'; MAX_SIZE + 1])).await;
    let error = large.refusal(Cloud::Ec2).await;
    assert!(error.contains("expected at most 262144 bytes"), "{error}");
}

#[tokio::test]
async fn other_answers_are_errors_that_name_them() {
    // Instance metadata is switched off.
    let forbidden = Server::start(|_| answer("403 Forbidden", "", b"")).await;
    assert_eq!(
        forbidden.refusal(Cloud::Ec2).await,
        "parameters from EC2 user data: session token: expected status 200 or 404, got 403 Forbidden"
    );
    // Nor is it absence that there are no tokens.
    let old = Server::start(|_| answer("404 Not Found", "", b"")).await;
    let error = old.refusal(Cloud::Ec2).await;
    assert!(error.contains("session token"), "{error}");
    // Whoever else is at the address.
    let error = old.refusal(Cloud::Google).await;
    assert!(
        error.contains("expected the header Metadata-Flavor: Google"),
        "{error}"
    );
    let strange = Server::start(|_| answer("200 OK", "", b"a\nb")).await;
    let error = strange.refusal(Cloud::Ec2).await;
    assert!(error.contains("session token: expected text"), "{error}");
    let google =
        Server::start(|_| answer("301 Moved Permanently", "Metadata-Flavor: Google\r\n", b""));
    let error = google.await.refusal(Cloud::Google).await;
    assert!(error.contains("got 301 Moved Permanently"), "{error}");
}

#[tokio::test]
async fn a_service_that_does_not_answer_yet_is_asked_again() {
    let mut answers = vec![
        answer(
            "200 OK",
            "Metadata-Flavor: Google\r\n",
            STANDARD.encode(RIGHT).as_bytes(),
        ),
        answer("429 Too Many Requests", "Metadata-Flavor: Google\r\n", b""),
        answer(
            "503 Service Unavailable",
            "Metadata-Flavor: Google\r\n",
            b"",
        ),
        b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 9\r\n\r\nc2".to_vec(),
        b"no HTTP at all\r\n\r\n".to_vec(),
        Vec::new(),
    ];
    let server = Server::start(move |_| answers.pop().unwrap()).await;
    let told = RefCell::new(Vec::new());
    let report = |report: &Report| match report {
        Report::Waiting(why) => told.borrow_mut().push(why.clone()),
        other => panic!("{other:?}"),
    };
    let pauses = [Duration::from_millis(1), Duration::from_millis(4)];
    let found = load_from(server.address, Cloud::Google, pauses, report).await;
    assert!(found.unwrap().is_some());
    let told = told.into_inner();
    assert_eq!(told.len(), 5, "{told:?}");
    for (why, wanted) in told.iter().zip(["ask", "ask", "answer", "503", "429"]) {
        assert!(why.contains(wanted), "{why}");
        assert!(why.starts_with("parameters from Google Cloud"), "{why}");
    }
}

#[test]
fn the_cloud_is_the_one_that_the_table_names() {
    for (vendor, product, expected) in [
        ("Amazon EC2", "m7i.large", Some(Cloud::Ec2)),
        ("Google", "Google Compute Engine", Some(Cloud::Google)),
        ("QEMU", "Standard PC (Q35 + ICH9, 2009)", None),
        ("Google", "Amazon EC2", None),
    ] {
        let sys = tempfile::tempdir().unwrap();
        let attributes = sys.path().join("class/dmi/id");
        fs::create_dir_all(&attributes).unwrap();
        for (name, value) in [("sys_vendor", vendor), ("product_name", product)] {
            fs::write(attributes.join(name), format!("{value}\n")).unwrap();
        }
        let smbios = Smbios::at(sys.path());
        assert_eq!(Cloud::of(&smbios).unwrap(), expected);
    }
    let nothing = tempfile::tempdir().unwrap();
    assert_eq!(Cloud::of(&Smbios::at(nothing.path())).unwrap(), None);
}
