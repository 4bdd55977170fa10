//! Responses of name servers, kept for as long as they are valid.
//!
//! The cache is for many pods that query the same few names, not for saving traffic: it is limited in
//! the number of responses, in the size of each, and in time. Pods may query zones that they control
//! themselves, so large responses are not kept.
//!
//! What is negative is kept for its own time (RFC 2308), that of the SOA record, also if it comes with
//! CNAMEs, whose TTLs are often hours: a record that somebody has just added must not stay hidden.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::upstream::{self, Asked};
use super::wire::{Answer, DATAGRAM_BYTES};

/// Maximum number of cached responses, each of which fits into a datagram.
const MAX_KEPT_ANSWERS: usize = 1024;
/// Maximum time for which a response is cached.
const MAX_KEPT_SECONDS: u32 = 300;
/// Maximum time for which a negative response is cached.
const MAX_NOTHING_KEPT_SECONDS: u32 = 30;

/// Cached responses.
#[derive(Default)]
pub(crate) struct Cache {
    kept: HashMap<Asked, Kept>,
}

struct Kept {
    answer: Arc<Answer>,
    since: Instant,
    until: Instant,
}

impl Cache {
    /// The response to this question in any letter case, and for how many seconds it was kept.
    pub(crate) fn find(&self, asked: &Asked, now: Instant) -> Option<(Arc<Answer>, u32)> {
        let kept = self.kept.get(asked).filter(|kept| now < kept.until)?;
        let age = now.duration_since(kept.since).as_secs();
        let age = u32::try_from(age).unwrap_or(u32::MAX);
        Some((kept.answer.clone(), age))
    }

    pub(crate) fn keep(&mut self, asked: &Asked, answer: &Arc<Answer>, now: Instant) {
        let Some(seconds) = holds_for(answer) else {
            return;
        };
        if self.kept.len() >= MAX_KEPT_ANSWERS {
            self.kept.retain(|_, kept| now < kept.until);
        }
        // Full of entries that are still valid: evict the oldest.
        if self.kept.len() >= MAX_KEPT_ANSWERS {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.since);
            if let Some(oldest) = oldest.map(|(asked, _)| asked.clone()) {
                self.kept.remove(&oldest);
            }
        }
        let kept = Kept {
            answer: answer.clone(),
            since: now,
            until: now + Duration::from_secs(seconds.into()),
        };
        self.kept.insert(asked.clone(), kept);
    }
}

/// Seconds for which a response may be cached; `None` if it must not be.
fn holds_for(answer: &Answer) -> Option<u32> {
    if !upstream::may_be_kept(answer) || answer.size() > usize::from(DATAGRAM_BYTES) {
        return None;
    }
    let answers = answer.shortest_ttl();
    let seconds = if upstream::is_negative(answer) {
        let nothing_else = answer.nothing_else_for()?;
        nothing_else
            .min(answers.unwrap_or(u32::MAX))
            .min(MAX_NOTHING_KEPT_SECONDS)
    } else {
        answers?.min(MAX_KEPT_SECONDS)
    };
    (seconds > 0).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
    use hickory_proto::rr::rdata::{A, CNAME, SOA};
    use hickory_proto::rr::{Name, RData, Record, RecordType};
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn asked(text: &str) -> Asked {
        Asked {
            query: Query::query(name(text), RecordType::A),
            signatures: false,
            checking_disabled: false,
        }
    }

    /// A response with these answers and authorities, each with its TTL.
    fn response(
        code: ResponseCode,
        answers: &[(u32, RData)],
        authorities: &[(u32, RData)],
    ) -> Arc<Answer> {
        let mut message = Message::new(7, MessageType::Response, OpCode::Query);
        message.metadata.response_code = code;
        message.add_query(asked("a.example.").query);
        let record =
            |(ttl, data): &(u32, RData)| Record::from_rdata(name("a.example."), *ttl, data.clone());
        message.insert_answers(answers.iter().map(record).collect());
        message.insert_authorities(authorities.iter().map(record).collect());
        let (answer, is_whole) = Answer::read(&message.to_vec().unwrap()).unwrap();
        assert!(is_whole);
        Arc::new(answer)
    }

    fn address() -> RData {
        RData::A(A::new(192, 0, 2, 1))
    }

    fn positive(ttl: u32) -> Arc<Answer> {
        response(ResponseCode::NoError, &[(ttl, address())], &[])
    }

    fn soa(minimum: u32) -> RData {
        RData::SOA(SOA::new(
            name("ns.example."),
            name("x.example."),
            1,
            2,
            3,
            4,
            minimum,
        ))
    }

    #[test]
    fn what_is_kept_is_found_in_any_letter_case_until_it_is_too_old() {
        let mut cache = Cache::default();
        let now = Instant::now();
        cache.keep(&asked("a.example."), &positive(60), now);
        let later = now + Duration::from_secs(20);
        let (_, age) = cache.find(&asked("A.example."), later).unwrap();
        assert_eq!(age, 20);
        let over = now + Duration::from_secs(60);
        assert!(cache.find(&asked("a.example."), over).is_none());
        // A TTL of years is capped.
        cache.keep(&asked("a.example."), &positive(u32::MAX), now);
        let later = now + Duration::from_secs(u64::from(MAX_KEPT_SECONDS));
        assert!(cache.find(&asked("a.example."), later).is_none());
        // A TTL of 0 is not cached.
        cache.keep(&asked("b.example."), &positive(0), now);
        assert!(cache.find(&asked("b.example."), now).is_none());
    }

    #[test]
    fn failures_and_large_answers_are_not_kept() {
        for code in [ResponseCode::ServFail, ResponseCode::Refused] {
            let failure = response(code, &[(60, address())], &[(60, soa(60))]);
            assert_eq!(holds_for(&failure), None);
        }
        let many = vec![(60, address()); 100];
        let large = response(ResponseCode::NoError, &many, &[]);
        assert_eq!(holds_for(&large), None);
        assert_eq!(holds_for(&positive(60)), Some(60));
    }

    #[test]
    fn a_negative_answer_is_kept_for_its_own_time() {
        let alias = |ttl| (ttl, RData::CNAME(CNAME(name("b.example."))));
        for code in [ResponseCode::NoError, ResponseCode::NXDomain] {
            let kept = |answers: &[(u32, RData)], authorities: &[(u32, RData)]| {
                holds_for(&response(code, answers, authorities))
            };
            // The alias is valid for an hour; that there is nothing behind it, for a second.
            assert_eq!(kept(&[alias(3600)], &[(1, soa(60))]), Some(1));
            assert_eq!(kept(&[alias(3600)], &[(60, soa(1))]), Some(1));
            assert_eq!(kept(&[alias(5)], &[(60, soa(60))]), Some(5));
            assert_eq!(kept(&[], &[(60, soa(20))]), Some(20));
            assert_eq!(
                kept(&[], &[(3600, soa(3600))]),
                Some(MAX_NOTHING_KEPT_SECONDS)
            );
            assert_eq!(kept(&[], &[(0, soa(60))]), None);
            // Nobody says for how long.
            assert_eq!(kept(&[alias(3600)], &[]), None);
            assert_eq!(kept(&[], &[(60, address())]), None);
        }
        let found = response(
            ResponseCode::NoError,
            &[alias(100), (200, address())],
            &[(1, soa(1))],
        );
        assert_eq!(holds_for(&found), Some(100));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

        #[test]
        fn only_so_much_is_kept(names in prop::collection::vec(0_u32..5000, 0..3000)) {
            let mut cache = Cache::default();
            let now = Instant::now();
            let answer = positive(60);
            for (turn, name) in names.iter().enumerate() {
                let now = now + Duration::from_millis(turn as u64);
                let asked = asked(&format!("n{name}.example."));
                cache.keep(&asked, &answer, now);
                prop_assert!(cache.find(&asked, now).is_some());
                prop_assert!(cache.kept.len() <= MAX_KEPT_ANSWERS);
            }
        }
    }
}
