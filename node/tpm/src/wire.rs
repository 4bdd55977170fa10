//! The byte format of TPM 2.0 (big-endian integers, sizes of 16 bits), written and read.
//!
//! Whatever is read here may come from a hostile TPM or a damaged file: every length is bounded by the caller before it is
//! used, and nothing panics. What is written may contain a secret, so the buffer is zeroised, and allocated once.

use zeroize::Zeroizing;

/// The largest command or response, as for the kernel's `/dev/tpmrm0`.
pub(crate) const MAX_SIZE: usize = 4096;

/// Bytes that do not have the format that they should have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {got}")]
pub struct Malformed {
    /// The part of the structure.
    pub field: &'static str,
    /// What it should have been.
    pub expected: String,
    /// What it is.
    pub got: String,
}

impl Malformed {
    pub(crate) fn new(
        field: &'static str,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Self {
            field,
            expected: expected.into(),
            got: got.into(),
        }
    }
}

/// Reads a structure from its start to its end.
#[derive(Clone)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn bytes(
        &mut self,
        field: &'static str,
        count: usize,
    ) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(|| {
            Malformed::new(field, format!("{count} bytes"), self.rest.len().to_string())
        })?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, Malformed> {
        self.array(field).map(u8::from_be_bytes)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        self.array(field).map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        self.array(field).map(u32::from_be_bytes)
    }

    /// A TPM2B: a size of 16 bits, then as many bytes, `max` at most.
    pub(crate) fn sized(&mut self, field: &'static str, max: usize) -> Result<&'a [u8], Malformed> {
        let size = usize::from(self.u16(field)?);
        if size > max {
            let expected = format!("{max} bytes at most");
            return Err(Malformed::new(field, expected, size.to_string()));
        }
        self.bytes(field, size)
    }

    /// A value that is known beforehand.
    pub(crate) fn expect(&mut self, field: &'static str, expected: &[u8]) -> Result<(), Malformed> {
        let got = self.bytes(field, expected.len())?;
        if got == expected {
            return Ok(());
        }
        Err(Malformed::new(
            field,
            hex::encode(expected),
            hex::encode(got),
        ))
    }

    /// Everything up to the end.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let got = format!("{} more bytes", self.rest.len());
        Err(Malformed::new("end", "no more bytes", got))
    }
}

/// Writes a structure.
pub(crate) struct Writer(Zeroizing<Vec<u8>>);

impl Writer {
    /// An empty buffer. It does not grow for anything that a TPM accepts, so no copy of a secret stays behind.
    pub(crate) fn new() -> Self {
        Self(Zeroizing::new(Vec::with_capacity(MAX_SIZE)))
    }

    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A TPM2B. Everything that is written is far shorter than what 16 bits can count.
    pub(crate) fn sized(self, bytes: &[u8]) -> Self {
        let size = u16::try_from(bytes.len()).expect("commands have 4096 bytes at most");
        self.u16(size).bytes(bytes)
    }

    pub(crate) fn finish(self) -> Zeroizing<Vec<u8>> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let bytes = Writer::new().u8(1).u16(2).u32(3).sized(b"four").finish();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u8("a"), Ok(1));
        assert_eq!(reader.u16("b"), Ok(2));
        assert_eq!(reader.u32("c"), Ok(3));
        assert_eq!(reader.sized("d", 4), Ok(&b"four"[..]));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn wrong_lengths_are_named() {
        let error = |result: Result<&[u8], Malformed>| result.unwrap_err().to_string();
        let sized = [0, 3, 1, 2, 3];
        let mut reader = Reader::new(&sized);
        assert_eq!(
            error(reader.sized("salt", 2)),
            "salt: expected 2 bytes at most, got 3"
        );
        let mut reader = Reader::new(&sized[..4]);
        assert_eq!(
            error(reader.sized("salt", 3)),
            "salt: expected 3 bytes, got 2"
        );
        assert_eq!(
            Reader::new(&sized).end().unwrap_err().to_string(),
            "end: expected no more bytes, got 5 more bytes"
        );
    }
}
