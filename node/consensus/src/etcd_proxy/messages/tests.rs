//! Messages as bytes of a stream.

use proptest::prelude::*;

use super::super::wire::KeyValue;
use super::*;

/// Splits the bytes into chunks of these lengths, until they run out.
fn cut<'a>(mut bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for length in lengths {
        let (piece, rest) = bytes.split_at((*length).min(bytes.len()));
        pieces.push(piece);
        bytes = rest;
    }
    pieces.push(bytes);
    pieces
}

proptest! {
    #[test]
    fn messages_are_found_however_they_come(
        values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
        lengths in prop::collection::vec(0_usize..60, 0..30),
    ) {
        let sent: Vec<KeyValue> = values
            .into_iter()
            .map(|value| KeyValue { value, ..Default::default() })
            .collect();
        let bytes: Vec<u8> = sent.iter().flat_map(|message| framed(message).unwrap()).collect();
        let mut frames = Frames::default();
        let mut found = Vec::new();
        for piece in cut(&bytes, &lengths) {
            frames.add(piece);
            while let Some(message) = frames.take().unwrap() {
                found.push(KeyValue::decode(message).unwrap());
            }
        }
        prop_assert_eq!(found, sent);
        prop_assert!(frames.is_empty());
    }

    #[test]
    fn no_bytes_are_found_that_did_not_come(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        small in any::<bool>(),
    ) {
        let mut bytes = bytes;
        // As lengths they would nearly all exceed the bytes that follow.
        if small && bytes.len() > 4 {
            bytes[..4].fill(0);
        }
        let mut frames = Frames::default();
        frames.add(&bytes);
        let mut found = 0;
        while let Ok(Some(message)) = frames.take() {
            found += FRAME_HEADER_BYTES + message.len();
        }
        prop_assert!(found <= bytes.len());
    }
}

#[test]
fn what_is_compressed_is_refused() {
    let of = |head: [u8; FRAME_HEADER_BYTES]| {
        let mut frames = Frames::default();
        frames.add(&head);
        frames.take().map_err(|status| status.code())
    };
    assert_eq!(of([1, 0, 0, 0, 0]), Err(Code::Unimplemented));
    assert_eq!(of([0, 0, 0, 0, 1]), Ok(None));
    assert_eq!(of([0; FRAME_HEADER_BYTES]), Ok(Some(Bytes::new())));
}

#[test]
fn requests_are_limited_each_and_answers_together() {
    let refused = |admitted: Result<Option<OwnedSemaphorePermit>, Status>| match admitted {
        Ok(_) => None,
        Err(status) => Some(status.code()),
    };
    let requests = Limit::Request;
    assert_eq!(refused(requests.admit(LARGEST_REQUEST)), None);
    let refusal = refused(requests.admit(LARGEST_REQUEST + 1));
    assert_eq!(refusal, Some(Code::ResourceExhausted));

    let answers = Limit::Answer(AnswerMemory::of(1 << 20));
    let first = answers.admit(1 << 19).unwrap();
    let second = answers.admit((1 << 19) - 1).unwrap();
    // There is always room for small ones.
    assert!(answers.admit(SMALL).unwrap().is_none());
    assert_eq!(
        refused(answers.admit(SMALL + 1)),
        Some(Code::ResourceExhausted)
    );
    drop(first);
    assert_eq!(refused(answers.admit(SMALL + 1)), None);
    drop(second);
    assert_eq!(refused(answers.admit(1 << 20)), None);
    let refusal = refused(answers.admit((1 << 20) + 1));
    assert_eq!(refusal, Some(Code::ResourceExhausted));
}
