//! The event log of the firmware: what was measured into the PCRs, one by one.
//!
//! The kernel offers it as a file, in the crypto-agile format of TCG's "PC Client Platform Firmware Profile": a first
//! event in the format of TPM 1.2 that names the hashes, then events with a digest for each hash. All integers are
//! little-endian.
//!
//! The log itself is not authentic, and neither is its event types or its data: only that its digests lead to the values of
//! the PCRs can be checked ([`replay`]). So nothing but digests is taken from it.

use super::pcr::{Digest, Pcr, PcrSelection, PcrValues, SHA256};
use super::wire::Malformed;

/// EV_NO_ACTION: a note in the log, which was not measured.
const NO_ACTION: u32 = 3;
/// The bytes of a SHA-1 digest, which the first event has.
const SHA1_DIGEST: usize = 20;
const SIGNATURE: &[u8; 16] = b"Spec ID Event03\0";
/// The largest log that is read, in bytes: firmware reserves 64 KiB, some of it more.
pub const MAX_LOG: usize = 1 << 20;
/// How many hashes a log may have.
const MAX_HASHES: u32 = 16;
/// How many events of one boot are replayed: a boot has less than 30 in the registers that matter.
pub const MAX_EVENTS: usize = 256;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootEvent {
    /// Into which register.
    pub pcr: Pcr,
    /// The measured digest (SHA-256).
    pub digest: Digest,
}

/// The measurements into these registers, in their order.
///
/// # Errors
/// If the log is not in the format, has no digests of SHA-256, or more than [`MAX_EVENTS`] such measurements.
pub fn events(log: &[u8], pcrs: PcrSelection) -> Result<Vec<BootEvent>, Malformed> {
    if log.len() > MAX_LOG {
        let expected = format!("{MAX_LOG} bytes at most");
        return Err(Malformed::new("event log", expected, log.len().to_string()));
    }
    let mut reader = Little(log);
    let hashes = header(&mut reader)?;
    let mut events = Vec::new();
    while !reader.0.is_empty() {
        let event = event(&mut reader, &hashes)?;
        let Some(event) = event.filter(|event| pcrs.has(event.pcr)) else {
            continue;
        };
        if events.len() == MAX_EVENTS {
            let expected = format!("{MAX_EVENTS} at most in {pcrs}");
            return Err(Malformed::new("events", expected, "more"));
        }
        events.push(event);
    }
    Ok(events)
}

/// The values that these measurements give to the registers, which were zero before; none if there is one into another
/// register.
pub fn replay(events: &[BootEvent], pcrs: PcrSelection) -> Option<PcrValues> {
    let start = pcrs.iter().map(|pcr| (pcr, Digest::ZERO));
    events
        .iter()
        .try_fold(start.collect(), |values: PcrValues, event| {
            values.extended(event.pcr, &event.digest)
        })
}

/// A hash of the log: its algorithm (TPM_ALG_ID) and the size of its digests.
type Hash = (u16, usize);

/// Reads the first event.
fn header(reader: &mut Little<'_>) -> Result<Vec<Hash>, Malformed> {
    reader.u32("register of the first event")?;
    let kind = reader.u32("type of the first event")?;
    if kind != NO_ACTION {
        let expected = format!("{NO_ACTION} (EV_NO_ACTION)");
        return Err(Malformed::new(
            "type of the first event",
            expected,
            kind.to_string(),
        ));
    }
    reader.bytes("digest of the first event", SHA1_DIGEST)?;
    let mut event = Little(reader.counted("first event")?);
    let signature = event.bytes("signature", SIGNATURE.len())?;
    if signature != SIGNATURE {
        let (expected, got) = (hex::encode(SIGNATURE), hex::encode(signature));
        return Err(Malformed::new("signature", expected, got));
    }
    // Platform class; version, errata, and the size of a firmware integer.
    event.bytes("platform and version", 4 + 4)?;
    let count = event.u32("number of hashes")?;
    if count > MAX_HASHES {
        let expected = format!("{MAX_HASHES} at most");
        return Err(Malformed::new(
            "number of hashes",
            expected,
            count.to_string(),
        ));
    }
    let mut hash = |_| {
        let algorithm = event.u16("hash")?;
        Ok((algorithm, event.u16("size of a digest")?.into()))
    };
    let hashes: Vec<Hash> = (0..count)
        .map(&mut hash)
        .collect::<Result<_, Malformed>>()?;
    if !hashes.contains(&(SHA256, 32)) {
        return Err(Malformed::new("hashes", "SHA-256 among them", "others"));
    }
    Ok(hashes)
}

/// Reads an event; none if it was not measured.
fn event(reader: &mut Little<'_>, hashes: &[Hash]) -> Result<Option<BootEvent>, Malformed> {
    let register = reader.u32("register")?;
    let kind = reader.u32("type")?;
    let count = reader.u32("number of digests")?;
    if usize::try_from(count) != Ok(hashes.len()) {
        let (expected, got) = (hashes.len().to_string(), count.to_string());
        return Err(Malformed::new("number of digests", expected, got));
    }
    let mut found = None;
    for _ in hashes {
        let algorithm = reader.u16("hash")?;
        let size = hashes.iter().find(|(known, _)| *known == algorithm);
        let (_, size) = size.ok_or_else(|| {
            Malformed::new("hash", "one of the log's", format!("{algorithm:#06x}"))
        })?;
        let digest = reader.bytes("digest", *size)?;
        if algorithm == SHA256 {
            found = digest.try_into().ok().map(Digest);
        }
    }
    reader.counted("event")?;
    if kind == NO_ACTION {
        return Ok(None);
    }
    let pcr = u8::try_from(register).ok().and_then(Pcr::new);
    let pcr = pcr.ok_or_else(|| Malformed::new("register", "below 24", register.to_string()))?;
    let digest = found.ok_or_else(|| Malformed::new("digests", "one of SHA-256", "none"))?;
    Ok(Some(BootEvent { pcr, digest }))
}

/// Reads little-endian integers. Sizes are only used to take bytes that are there.
struct Little<'a>(&'a [u8]);

impl<'a> Little<'a> {
    fn bytes(&mut self, field: &'static str, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(|| {
            Malformed::new(field, format!("{count} bytes"), self.0.len().to_string())
        })?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N)?);
        Ok(array)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        self.array(field).map(u16::from_le_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        self.array(field).map(u32::from_le_bytes)
    }

    /// A size of 32 bits, then as many bytes.
    fn counted(&mut self, field: &'static str) -> Result<&'a [u8], Malformed> {
        let size = self.u32(field)?;
        self.bytes(field, usize::try_from(size).unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const SHA1: (u16, usize) = (0x0004, 20);
    const SHA384: (u16, usize) = (0x000c, 48);
    const ALL: PcrSelection = PcrSelection::of([Pcr::BOOT_PROGRAMS, Pcr::KERNEL_IMAGE]);

    /// The first event, with these hashes.
    fn first(hashes: &[Hash]) -> Vec<u8> {
        let mut event = SIGNATURE.to_vec();
        event.extend([0, 0, 0, 0, 0, 2, 0, 2]);
        event.extend((hashes.len() as u32).to_le_bytes());
        for (algorithm, size) in hashes {
            event.extend(algorithm.to_le_bytes());
            event.extend((*size as u16).to_le_bytes());
        }
        event.push(0);
        let mut log = [0_u32, NO_ACTION].map(u32::to_le_bytes).concat();
        log.extend([0; SHA1_DIGEST]);
        log.extend((event.len() as u32).to_le_bytes());
        log.extend(event);
        log
    }

    /// An event with a digest for each hash; that of SHA-256 is `value`, repeated.
    fn event(hashes: &[Hash], register: u32, kind: u32, value: u8) -> Vec<u8> {
        let count = hashes.len() as u32;
        let mut bytes = [register, kind, count].map(u32::to_le_bytes).concat();
        for (algorithm, size) in hashes {
            bytes.extend(algorithm.to_le_bytes());
            let value = if *algorithm == SHA256 { value } else { !value };
            bytes.extend(vec![value; *size]);
        }
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(b"data");
        bytes
    }

    fn log(hashes: &[Hash], events: &[(u32, u32, u8)]) -> Vec<u8> {
        let each = events
            .iter()
            .map(|(pcr, kind, value)| event(hashes, *pcr, *kind, *value));
        std::iter::once(first(hashes))
            .chain(each)
            .flatten()
            .collect()
    }

    #[test]
    fn measurements_of_some_registers_are_read_in_their_order() {
        for hashes in [&[(SHA256, 32)][..], &[SHA1, (SHA256, 32), SHA384]] {
            let log = log(
                hashes,
                &[
                    (4, 5, 1),
                    (0, 8, 2),
                    (11, 13, 3),
                    (4, NO_ACTION, 4),
                    (4, 13, 5),
                ],
            );
            let found = events(&log, ALL).unwrap();
            let found: Vec<_> = found
                .iter()
                .map(|event| (event.pcr, event.digest.0[0]))
                .collect();
            let (programs, image) = (Pcr::BOOT_PROGRAMS, Pcr::KERNEL_IMAGE);
            assert_eq!(found, [(programs, 1), (image, 3), (programs, 5)]);
        }
    }

    #[test]
    fn what_is_wrong_with_a_log_is_named() {
        let own = [(SHA256, 32)];
        let error = |log: &[u8]| events(log, ALL).unwrap_err().to_string();
        assert!(error(&first(&[SHA1])).contains("SHA-256"));
        assert!(error(&log(&own, &[(24, 5, 1)])).contains("below 24, got 24"));
        let mut other = first(&own);
        other[32] = b'X';
        assert!(error(&other).starts_with("signature"));
        let mut foreign = log(&own, &[(4, 5, 1)]);
        let at = first(&own).len() + 12;
        foreign[at] = 0x04;
        assert!(error(&foreign).contains("0x0004"));
        let many = log(&own, &vec![(4, 5, 1); MAX_EVENTS + 1]);
        assert!(error(&many).contains("256 at most"));
        let whole = log(&own, &[(4, 5, 1)]);
        for length in 0..whole.len() {
            let cut = events(&whole[..length], ALL);
            // A log ends between two events.
            assert_eq!(cut.is_ok(), length == first(&own).len(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(mut bytes in vec(any::<u8>(), 0..400), prefixed in any::<bool>()) {
            if prefixed {
                bytes = [first(&[SHA1, (SHA256, 32)]), bytes].concat();
            }
            let _ = events(&bytes, ALL);
        }
    }
}
