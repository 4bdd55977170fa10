//! Calls that are repeated while a curator has no contact with consensus.

use std::time::Duration;

use tonic::{Code, Status};

use super::no_answer;

/// Between two calls to a curator that has lost contact with consensus: it answers at once.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Repeats a call while the curator answers that it has no contact with consensus. A cluster of one node has none for a
/// moment when it first expects another node, and any cluster for a while if its machines get too little of the host.
///
/// # Errors
/// Any other error of the call. When `bound` has elapsed, its last one, or `DeadlineExceeded` if it has not answered.
pub async fn retry_unavailable<T, F>(bound: Duration, call: impl Fn() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut last = None;
    let answered = async {
        loop {
            match call().await {
                Err(status) if status.code() == Code::Unavailable => last = Some(status),
                answer => return answer,
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    };
    match tokio::time::timeout(bound, answered).await {
        Ok(answer) => answer,
        Err(_) => Err(last.unwrap_or_else(|| no_answer(bound))),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn only_who_is_out_of_touch_is_asked_again() {
        let asked = Cell::new(0);
        let answer = |codes: &'static [Code]| {
            asked.set(0);
            let asked = &asked;
            move || {
                let code = codes[usize::min(asked.get(), codes.len() - 1)];
                asked.set(asked.get() + 1);
                std::future::ready(match code {
                    Code::Ok => Ok(asked.get()),
                    code => Err(Status::new(code, "no")),
                })
            }
        };
        let bound = Duration::from_secs(20);
        let answered = retry_unavailable(bound, answer(&[Code::Unavailable, Code::Ok])).await;
        assert_eq!(answered.expect("an answer"), 2);
        let refused = retry_unavailable(bound, answer(&[Code::NotFound, Code::Ok])).await;
        assert_eq!(refused.expect_err("refused").code(), Code::NotFound);
        let short = Duration::from_millis(1);
        let silent = retry_unavailable(short, answer(&[Code::Unavailable])).await;
        assert_eq!(silent.expect_err("silent").code(), Code::Unavailable);
        let unanswered = retry_unavailable(short, std::future::pending::<Result<(), Status>>).await;
        let error = unanswered.expect_err("no answer");
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert_eq!(error.message(), "no answer within 1ms");
    }
}
