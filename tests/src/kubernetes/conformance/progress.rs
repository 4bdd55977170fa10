//! The results that Kubernetes' test program reports: each over HTTP as soon as it is there, and all of them in a file at
//! its end. The first are in time, the second complete: the program does not wait for its last reports.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result};
use futures::future::BoxFuture;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;

use super::results::CaseResult;

/// Receives the reports.
pub(super) struct Reports(TcpListener);

impl Reports {
    pub(super) async fn open() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        Ok(Self(listener.context("cannot listen for progress")?))
    }

    /// Where the program sends them.
    pub(super) fn url(&self) -> Result<String> {
        Ok(format!("http://{}/", self.0.local_addr()?))
    }

    /// The next report: of a case and whether it passed, or of something else.
    pub(super) async fn next(&self) -> Result<Option<(String, bool)>> {
        loop {
            let (stream, _) = self.0.accept().await?;
            let body = Mutex::new(None);
            let service = service_fn(|request: Request<Incoming>| -> BoxFuture<'_, _> {
                let body = &body;
                Box::pin(async move {
                    let sent = request.into_body().collect().await?.to_bytes();
                    *body.lock().expect("nobody panics") = Some(sent);
                    Ok::<_, hyper::Error>(Response::new(Empty::<Bytes>::new()))
                })
            });
            // One request for each connection. A connection that fails brings no report.
            let served = http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = served.await;
            if let Some(body) = body.into_inner().expect("nobody panics") {
                return Ok(result(&body));
            }
        }
    }
}

/// A case and whether it passed, if the report is about that.
fn result(report: &[u8]) -> Option<(String, bool)> {
    let progress: Value = serde_json::from_slice(report).ok()?;
    let (word, case) = progress["msg"].as_str()?.split_once(' ')?;
    match word {
        "PASSED" => Some((words(case), true)),
        "FAILED" => Some((words(case), false)),
        _ => None,
    }
}

/// The results in the file that the program has written.
pub(super) fn results(path: &Path) -> Result<Vec<CaseResult>> {
    let context = || format!("cannot read {}", path.display());
    let report = fs::read(path).with_context(context)?;
    let report: Value = serde_json::from_slice(&report).with_context(context)?;
    Ok(parse(&report))
}

fn parse(report: &Value) -> Vec<CaseResult> {
    let suites = report.as_array().into_iter().flatten();
    let specs = suites
        .filter_map(|suite| suite["SpecReports"].as_array())
        .flatten();
    let of = |spec: &Value| {
        let state = spec["State"].as_str()?;
        if spec["LeafNodeType"] != "It" || matches!(state, "skipped" | "pending") {
            return None;
        }
        let around = spec["ContainerHierarchyTexts"].as_array();
        let around = around.into_iter().flatten().filter_map(Value::as_str);
        let name: Vec<_> = around.chain(spec["LeafNodeText"].as_str()).collect();
        Some(CaseResult {
            case: words(&name.join(" ")),
            passed: state == "passed",
            seconds: spec["RunTime"].as_f64().unwrap_or_default() / 1e9,
        })
    };
    specs.filter_map(of).collect()
}

/// A name with single blanks: upstream has a few with two, and its own list wraps lines there.
pub(super) fn words(name: &str) -> String {
    let words: Vec<_> = name.split_whitespace().collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn reports_are_heard() {
        let reports = Reports::open().await.unwrap();
        let address = reports.0.local_addr().unwrap();
        let post = async |body: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let length = body.len();
            let request =
                format!("POST / HTTP/1.1\r\nHost: it\r\nContent-Length: {length}\r\n\r\n{body}");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        };
        for (body, expected) in [
            (
                r#"{"msg":"PASSED [a] b should c  [Conformance]","total":2,"completed":1}"#,
                Some(("[a] b should c [Conformance]".to_owned(), true)),
            ),
            (r#"{"msg":"FAILED x"}"#, Some(("x".to_owned(), false))),
            (r#"{"msg":"Test Suite starting"}"#, None),
            ("PASSED x", None),
        ] {
            let (heard, ()) = tokio::join!(reports.next(), post(body));
            assert_eq!(heard.unwrap(), expected);
        }
    }

    #[test]
    fn the_file_has_what_was_run() {
        let spec = |name: &str, kind: &str, state: &str| {
            json!({
                "ContainerHierarchyTexts": ["[a]", "b"],
                "LeafNodeText": name,
                "LeafNodeType": kind,
                "State": state,
                "RunTime": 1_500_000_000_u64,
            })
        };
        let report = json!([{ "SpecReports": [
            spec("should  c", "It", "passed"),
            spec("d", "It", "skipped"),
            spec("e", "It", "timedout"),
            spec("", "BeforeSuite", "passed"),
        ] }]);
        let result = |case: &str, passed| CaseResult {
            case: case.to_owned(),
            passed,
            seconds: 1.5,
        };
        let expected = [result("[a] b should c", true), result("[a] b e", false)];
        assert_eq!(parse(&report), expected);
    }
}
