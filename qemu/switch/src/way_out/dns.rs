//! The little that forwarding needs to know of DNS messages (RFC 1035). Pure.

/// The fixed part of a message.
const HEADER: usize = 12;

/// Answers, in the third byte: a response, and one that is incomplete.
const RESPONSE: u8 = 0x80;
const TRUNCATED: u8 = 0x02;

/// Bytes after the name of a question: its type and its class.
const AFTER_NAME: usize = 4;

/// Whether a message is a query.
pub(crate) fn is_query(message: &[u8]) -> bool {
    message.len() >= HEADER && message[2] & RESPONSE == 0
}

/// Whether a message is a response to this query.
pub(crate) fn answers(message: &[u8], query: &[u8]) -> bool {
    message.len() >= HEADER && message[2] & RESPONSE != 0 && message[..2] == query[..2]
}

/// A response without its records, whose recipient asks again over TCP. None if its question is malformed.
pub(crate) fn truncated(response: &[u8]) -> Option<Vec<u8>> {
    let questions = u16::from_be_bytes([*response.get(4)?, *response.get(5)?]);
    let mut end = HEADER;
    for _ in 0..questions {
        end = end_of_name(response, end)? + AFTER_NAME;
    }
    let mut short = response.get(..end)?.to_vec();
    short[2] |= TRUNCATED;
    // No answers, authorities and additional records.
    short[6..HEADER].fill(0);
    Some(short)
}

/// The position after a name in a question, where no name is compressed.
fn end_of_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            length @ 1..=63 => at += 1 + usize::from(length),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// A query for the addresses of a.example.
    const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01";

    fn response() -> Vec<u8> {
        let mut response = QUERY.to_vec();
        response[2] |= RESPONSE;
        response[7] = 1;
        response.extend(b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\xc0\0\x02\x01");
        response
    }

    #[test]
    fn a_response_belongs_to_its_query() {
        assert!(is_query(QUERY));
        assert!(!is_query(&response()));
        assert!(!is_query(&QUERY[..HEADER - 1]));
        assert!(answers(&response(), QUERY));
        assert!(!answers(QUERY, QUERY));
        let mut other = response();
        other[1] ^= 1;
        assert!(!answers(&other, QUERY));
    }

    #[test]
    fn a_truncated_response_keeps_the_question() {
        let short = truncated(&response()).expect("a response");
        assert!(answers(&short, QUERY));
        assert_eq!(short[2] & TRUNCATED, TRUNCATED);
        assert_eq!(short[HEADER..], QUERY[HEADER..]);
        assert_eq!(short[4..HEADER], [0, 1, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_messages_are_read(message in vec(any::<u8>(), 0..100)) {
            is_query(&message);
            answers(&message, QUERY);
            if let Some(short) = truncated(&message) {
                prop_assert!(short.len() <= message.len());
            }
        }
    }
}
