//! Frames on a stream: each is preceded by its length, 32 bits, most significant byte first. This is the format of
//! QEMU's `-netdev stream`.

/// The largest frame that QEMU sends.
pub(super) const MAX_FRAME: usize = 4096 + (64 << 10);

const LENGTH: usize = 4;

/// Memory of read data is released once this much of it has been processed.
const COMPACT: usize = 64 << 10;

/// A length that no machine sends: the stream is corrupt, and no later frame can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame length: expected at most 69632 bytes, got {0}")]
pub(super) struct TooLong(pub(super) usize);

/// Splits a stream into frames.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    used: usize,
}

impl Decoder {
    /// The buffer that the next part of the stream is appended to.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        if self.used == self.bytes.len() {
            self.bytes.clear();
            self.used = 0;
        } else if self.used >= COMPACT {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
        &mut self.bytes
    }

    /// The next frame, if it is complete.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TooLong> {
        let Some((length, rest)) = self.bytes[self.used..].split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(TooLong(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let start = self.used + LENGTH;
        self.used = start + length;
        Ok(Some(&self.bytes[start..self.used]))
    }
}

/// Appends a frame, whose length [`Decoder`] must accept.
pub(super) fn encode(frame: &[u8], stream: &mut Vec<u8>) {
    debug_assert!(frame.len() <= MAX_FRAME, "{}", frame.len());
    stream.extend_from_slice(&(frame.len() as u32).to_be_bytes());
    stream.extend_from_slice(frame);
}

/// The length of a frame in the stream.
pub(super) fn encoded_len(frame: &[u8]) -> usize {
    LENGTH + frame.len()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// All frames of a stream that arrives in these pieces.
    fn decode(stream: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        let mut rest = stream;
        let mut pieces = pieces.iter().cycle();
        while !rest.is_empty() {
            let piece = pieces
                .next()
                .map_or(rest.len(), |piece| *piece)
                .min(rest.len());
            decoder.buffer().extend_from_slice(&rest[..piece]);
            rest = &rest[piece..];
            while let Some(frame) = decoder.next()? {
                frames.push(frame.to_vec());
            }
        }
        Ok(frames)
    }

    #[test]
    fn the_layout_is_qemus() {
        let mut stream = Vec::new();
        encode(&[7; 3], &mut stream);
        assert_eq!(stream, [0, 0, 0, 3, 7, 7, 7]);
        assert_eq!(stream.len(), encoded_len(&[7; 3]));
    }

    #[test]
    fn a_frame_that_is_too_long_is_no_frame() {
        let largest = vec![0; MAX_FRAME];
        let mut stream = Vec::new();
        encode(&largest, &mut stream);
        assert_eq!(decode(&stream, &[1000]), Ok(vec![largest]));
        let length = MAX_FRAME + 1;
        let stream = (length as u32).to_be_bytes();
        assert_eq!(decode(&stream, &[4]), Err(TooLong(length)));
    }

    #[test]
    fn what_is_used_is_given_back() {
        let mut decoder = Decoder::default();
        let mut stream = Vec::new();
        encode(&[1; 1000], &mut stream);
        // Never empty after a read.
        decoder.buffer().extend_from_slice(&stream[..500]);
        for _ in 0..10_000 {
            decoder.buffer().extend_from_slice(&stream[500..]);
            assert_eq!(decoder.next().expect("short").map(<[u8]>::len), Some(1000));
            decoder.buffer().extend_from_slice(&stream[..500]);
            assert_eq!(decoder.next(), Ok(None));
        }
        assert!(decoder.bytes.len() < 2 * COMPACT, "{}", decoder.bytes.len());
    }

    proptest! {
        #[test]
        fn any_frames_come_out_as_they_went_in(
            frames in vec(vec(any::<u8>(), 0..200), 0..20),
            pieces in vec(1..300_usize, 1..10),
        ) {
            let mut stream = Vec::new();
            for frame in &frames {
                encode(frame, &mut stream);
            }
            prop_assert_eq!(decode(&stream, &pieces), Ok(frames));
        }

        #[test]
        fn any_bytes_are_read(stream in vec(any::<u8>(), 0..500), pieces in vec(1..20_usize, 1..4)) {
            let whole = decode(&stream, &[stream.len().max(1)]);
            prop_assert_eq!(decode(&stream, &pieces).is_ok(), whole.is_ok());
        }
    }
}
