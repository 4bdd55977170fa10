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
fn what_is_compressed_or_too_long_is_refused() {
    let of = |head: [u8; FRAME_HEADER_BYTES]| {
        let mut frames = Frames::default();
        frames.add(&head);
        frames.take().map_err(|status| status.code())
    };
    assert_eq!(of([1, 0, 0, 0, 0]), Err(Code::Unimplemented));
    let [a, b, c, d] = (u32::try_from(LARGEST_MESSAGE).unwrap() + 1).to_be_bytes();
    assert_eq!(of([0, a, b, c, d]), Err(Code::ResourceExhausted));
    assert_eq!(of([0, 0, 0, 0, 1]), Ok(None));
    assert_eq!(of([0; FRAME_HEADER_BYTES]), Ok(Some(Bytes::new())));
}
