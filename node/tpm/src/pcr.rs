//! Platform configuration registers of the SHA-256 bank, and their values.
//!
//! A TPM can have banks for several hashes. Only that of SHA-256 is used: every TPM 2.0 for PCs has it, and a policy that
//! named another bank could be met on machines whose firmware leaves that bank alone, by whoever extends it first.

use std::collections::BTreeMap;
use std::fmt;

use ring::digest;

use super::wire::{Malformed, Reader, Writer};

/// TPM_ALG_SHA256.
pub(crate) const SHA256: u16 = 0x000b;

/// How many PCRs a TPM for PCs has.
const COUNT: u8 = 24;

/// A SHA-256 digest: a PCR's value, a policy, or the fingerprint of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The value of the PCRs 0 to 15 after a reset, and of an empty policy.
    pub const ZERO: Self = Self([0; 32]);

    /// The digest of all `parts`, one after the other.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut context = digest::Context::new(&digest::SHA256);
        for part in parts {
            context.update(part);
        }
        let mut value = [0; 32];
        value.copy_from_slice(context.finish().as_ref());
        Self(value)
    }

    /// The value that a PCR with this value has after it was extended with `measurement`.
    pub fn extended(&self, measurement: &Digest) -> Self {
        Self::of(&[&self.0, &measurement.0])
    }

    /// The value that a PCR with this value has after `data` was measured into it.
    pub fn measured(&self, data: &[u8]) -> Self {
        self.extended(&Self::of(&[data]))
    }

    /// From 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut value = [0; 32];
        hex::decode_to_slice(text, &mut value).ok()?;
        Some(Self(value))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One of the 24 registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pcr(u8);

impl Pcr {
    /// The programs that the firmware was to start, boot loader and kernel among them.
    pub const BOOT_PROGRAMS: Self = Self(4);
    /// The state of Secure Boot: whether it is on, and the keys and certificates with which it verified what was started.
    pub const SECURE_BOOT: Self = Self(7);
    /// The parts of the unified kernel image, as its stub measured them.
    pub const KERNEL_IMAGE: Self = Self(11);
    /// The kernel's command line, as the boot loader and the stub passed it on.
    pub const COMMAND_LINE: Self = Self(12);

    /// The register with this number; none from 24 on.
    pub const fn new(index: u8) -> Option<Self> {
        if index < COUNT {
            Some(Self(index))
        } else {
            None
        }
    }

    /// The number, below 24.
    pub const fn index(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Pcr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PCR {}", self.0)
    }
}

/// A set of registers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PcrSelection(u32);

impl PcrSelection {
    /// No register.
    pub const EMPTY: Self = Self(0);

    /// These registers.
    pub const fn of<const N: usize>(pcrs: [Pcr; N]) -> Self {
        let mut bits = 0;
        let mut at = 0;
        while at < N {
            bits |= 1 << pcrs[at].0;
            at += 1;
        }
        Self(bits)
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this register is among them.
    pub const fn has(self, pcr: Pcr) -> bool {
        self.0 & 1 << pcr.0 != 0
    }

    /// How many there are.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The registers, the lowest first.
    pub fn iter(self) -> impl Iterator<Item = Pcr> {
        (0..COUNT).map(Pcr).filter(move |pcr| self.has(*pcr))
    }

    /// Those that are not in `other`.
    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// TPMS_PCR_SELECTION's pcrSelect: one bit for each register, PCR 0 first.
    pub(crate) fn bits(self) -> [u8; 3] {
        let [a, b, c, _] = self.0.to_le_bytes();
        [a, b, c]
    }

    pub(crate) fn from_bits([a, b, c]: [u8; 3]) -> Self {
        Self(u32::from_le_bytes([a, b, c, 0]))
    }

    /// TPML_PCR_SELECTION with the one bank, or with none for no register.
    pub(crate) fn write(self, writer: Writer) -> Writer {
        if self.is_empty() {
            return writer.u32(0);
        }
        let writer = writer.u32(1).u16(SHA256);
        writer.u8(3).bytes(&self.bits())
    }

    /// TPML_PCR_SELECTION. Banks of other hashes count as wrong: none was asked for.
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        match reader.u32("number of PCR banks")? {
            0 => Ok(Self::EMPTY),
            1 => {
                reader.expect("hash of the PCR bank", &SHA256.to_be_bytes())?;
                reader.expect("size of the PCR selection", &[3])?;
                reader.array("PCR selection").map(Self::from_bits)
            }
            more => Err(Malformed::new(
                "number of PCR banks",
                "1 at most",
                more.to_string(),
            )),
        }
    }
}

impl FromIterator<Pcr> for PcrSelection {
    fn from_iter<I: IntoIterator<Item = Pcr>>(pcrs: I) -> Self {
        let bits = pcrs.into_iter().fold(0, |bits, pcr| bits | 1 << pcr.0);
        Self(bits)
    }
}

impl fmt::Display for PcrSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.iter().map(|pcr| pcr.0.to_string()).collect();
        write!(f, "PCR {}", numbers.join(", "))
    }
}

/// The values of some registers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PcrValues(BTreeMap<Pcr, Digest>);

impl PcrValues {
    /// The value of a register, if it is among them.
    pub fn get(&self, pcr: Pcr) -> Option<Digest> {
        self.0.get(&pcr).copied()
    }

    /// The registers.
    pub fn selection(&self) -> PcrSelection {
        self.0.keys().copied().collect()
    }

    /// The registers and their values, the lowest first.
    pub fn iter(&self) -> impl Iterator<Item = (Pcr, Digest)> {
        self.0.iter().map(|(pcr, value)| (*pcr, *value))
    }

    /// The values after this measurement; none if the register is not among them.
    pub(crate) fn extended(mut self, pcr: Pcr, measurement: &Digest) -> Option<Self> {
        let value = self.0.get_mut(&pcr)?;
        *value = value.extended(measurement);
        Some(self)
    }

    /// What a TPM hashes for a policy: the digest of all values.
    pub fn digest(&self) -> Digest {
        let values: Vec<&[u8]> = self.0.values().map(|value| &value.0[..]).collect();
        Digest::of(&values)
    }

    /// Where `found` differs from these values, or lacks one.
    pub fn differences(&self, found: &PcrValues) -> Vec<PcrDifference> {
        let difference = |(pcr, expected)| {
            let found = found.get(pcr)?;
            (found != expected).then_some(PcrDifference {
                pcr,
                expected,
                found,
            })
        };
        self.iter().filter_map(difference).collect()
    }
}

impl FromIterator<(Pcr, Digest)> for PcrValues {
    fn from_iter<I: IntoIterator<Item = (Pcr, Digest)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl fmt::Display for PcrValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = self
            .iter()
            .map(|(pcr, value)| format!("{pcr} = {value}"))
            .collect();
        f.write_str(&values.join(", "))
    }
}

/// A register that does not have the expected value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PcrDifference {
    /// Which register.
    pub pcr: Pcr,
    /// The value when the secret was sealed.
    pub expected: Digest,
    /// The value now.
    pub found: Digest,
}

impl fmt::Display for PcrDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pcr,
            expected,
            found,
        } = self;
        write!(f, "{pcr}: expected {expected}, got {found}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_has_the_bits_of_the_specification() {
        let selection = PcrSelection::of([Pcr::SECURE_BOOT, Pcr::KERNEL_IMAGE]);
        let bytes = selection.write(Writer::new()).finish();
        assert_eq!(hex::encode(&*bytes), "00000001000b03800800");
        assert_eq!(PcrSelection::read(&mut Reader::new(&bytes)), Ok(selection));
        assert_eq!(selection.to_string(), "PCR 7, 11");
        assert_eq!(Pcr::new(24), None);
    }

    #[test]
    fn differences_name_the_register_and_both_values() {
        let values = |value| PcrValues::from_iter([(Pcr::SECURE_BOOT, Digest([value; 32]))]);
        assert_eq!(values(1).differences(&values(1)), []);
        let [difference] = values(1).differences(&values(2))[..] else {
            panic!("one difference");
        };
        let expected = format!(
            "PCR 7: expected {}, got {}",
            "01".repeat(32),
            "02".repeat(32)
        );
        assert_eq!(difference.to_string(), expected);
    }
}
