//! The header of the data partition: its owner, and whether formatting has completed.
//!
//! The first MiB of the partition belongs to the header, the rest is the payload. The header is
//! stored in two slots (see [`hearth_sys::slots`]), half a MiB apart so that one damaged area does
//! not affect both; the rest of the MiB is zero.
//!
//! The header makes it possible to detect a swapped or foreign disk before anything is written to
//! it. It is readable without a key: a node has to know whose disk it has before it can request a
//! key. So the header is verified twice: against the sealed configuration, and, with encryption, by
//! a MAC whose key is derived from both unlock keys. It never says *how* the payload is encrypted:
//! otherwise an attacker who can write it could turn encryption off.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use hearth_api::identity::{ClusterId, EnrolmentId, NodeId};
use hearth_api::private::{DataHeader, DataPhase};
use hearth_sys::slots::{Loaded, RegionSlot, SlotError, SlotFormat, SlotPair};
use prost::Message;
use ring::hmac;

use super::keys::{SALT_LEN, Secrets};

/// The size of the header region, in bytes; the payload follows.
pub const REGION: u64 = 1 << 20;

/// How a header begins.
pub const MAGIC: [u8; 8] = *b"HRTHDATA";

const FORMAT: SlotFormat = SlotFormat {
    magic: MAGIC,
    version: VERSION,
};
const VERSION: u32 = 1;
const SLOT_LEN: usize = 4096;
/// The maximum length of a header's record. A first write leaves zeros after it.
const LONGEST_RECORD: usize = 512;
const SLOTS_AT: [u64; 2] = [0, REGION / 2];

/// The progress of formatting a data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The file system may be incomplete. There is no data of value.
    Initialising,
    /// The file system is complete and may hold data.
    Ready,
}

/// The owner of a data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The enrolment in which the partition was formatted.
    pub enrolment_id: EnrolmentId,
    /// The node's ID.
    pub node_id: NodeId,
    /// The cluster's ID.
    pub cluster_id: ClusterId,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "node {} of cluster {}, enrolment {}",
            self.node_id, self.cluster_id, self.enrolment_id
        )
    }
}

/// The header of a data partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The progress of formatting.
    pub phase: Phase,
    /// The owner of the partition.
    pub owner: Owner,
    /// Random, generated at each format.
    pub salt: [u8; SALT_LEN],
    mac: Vec<u8>,
}

impl Header {
    /// A header with its MAC; without `secrets`, for an INSECURE data partition, it has none.
    pub fn new(
        phase: Phase,
        owner: Owner,
        salt: [u8; SALT_LEN],
        secrets: Option<&Secrets>,
    ) -> Self {
        let mut header = Self {
            phase,
            owner,
            salt,
            mac: Vec::new(),
        };
        if let Some(secrets) = secrets {
            let tag = hmac::sign(&secrets.mac_key(&salt), &header.authenticated());
            header.mac = tag.as_ref().to_vec();
        }
        header
    }

    /// Whether the MAC matches these secrets; without secrets, whether there is no MAC.
    pub fn is_authentic(&self, secrets: Option<&Secrets>) -> bool {
        match secrets {
            None => self.mac.is_empty(),
            Some(secrets) => {
                let key = secrets.mac_key(&self.salt);
                hmac::verify(&key, &self.authenticated(), &self.mac).is_ok()
            }
        }
    }

    /// The bytes that the MAC covers: `hearth data header`, version (u32, little-endian), phase (1
    /// byte), enrolment ID, node ID, cluster ID (16 bytes each), salt.
    fn authenticated(&self) -> Vec<u8> {
        [
            b"hearth data header".as_slice(),
            &VERSION.to_le_bytes(),
            &[i32::from(DataPhase::from(self.phase)) as u8],
            self.owner.enrolment_id.as_bytes(),
            self.owner.node_id.as_bytes(),
            self.owner.cluster_id.as_bytes(),
            &self.salt,
        ]
        .concat()
    }

    /// The record in a slot.
    pub fn encode(&self) -> Vec<u8> {
        DataHeader {
            version: VERSION,
            phase: DataPhase::from(self.phase).into(),
            enrolment_id: self.owner.enrolment_id.as_bytes().to_vec(),
            node_id: self.owner.node_id.to_string(),
            cluster_id: self.owner.cluster_id.as_bytes().to_vec(),
            salt: self.salt.to_vec(),
            mac: self.mac.clone(),
        }
        .encode_to_vec()
    }

    /// Decodes the record in a slot. On error, returns the invalid field.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let message = DataHeader::decode(bytes).map_err(|error| error.to_string())?;
        if message.version != VERSION {
            return Err(format!(
                "version: expected {VERSION}, got {}",
                message.version
            ));
        }
        Ok(Self {
            phase: match message.phase() {
                DataPhase::Initialising => Phase::Initialising,
                DataPhase::Ready => Phase::Ready,
                DataPhase::Unspecified => {
                    return Err(format!(
                        "phase: expected a known phase, got {}",
                        message.phase
                    ));
                }
            },
            owner: Owner {
                enrolment_id: message.enrolment_id[..]
                    .try_into()
                    .map_err(|error| format!("{error}"))?,
                node_id: message
                    .node_id
                    .parse()
                    .map_err(|error| format!("{error}"))?,
                cluster_id: message.cluster_id[..]
                    .try_into()
                    .map_err(|error| format!("{error}"))?,
            },
            salt: message
                .salt
                .try_into()
                .map_err(|salt: Vec<u8>| format!("salt: expected 32 bytes, got {}", salt.len()))?,
            mac: message.mac,
        })
    }
}

impl From<Phase> for DataPhase {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Initialising => Self::Initialising,
            Phase::Ready => Self::Ready,
        }
    }
}

/// The content of the header region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderState {
    /// Only zeros.
    Blank,
    /// Only a part of the first of the two writes of a first header. The header is acknowledged
    /// after the second write, so nothing depends on it.
    Unfinished,
    /// A valid header.
    Header(Header),
    /// Any other content, and why it is not a header. Never overwritten.
    Foreign(String),
}

/// Why the header could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// I/O on the header region failed.
    #[error("{}: cannot {step} the first MiB", device.display())]
    Io {
        /// The device.
        device: PathBuf,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The slots cannot be written.
    #[error("cannot access the header of the data partition")]
    Slots(#[from] SlotError),
}

/// The header region of one device. A node has only one per device, because it remembers which
/// slot's last write failed.
#[derive(Debug)]
pub struct HeaderRegion {
    device: PathBuf,
    slots: SlotPair<RegionSlot>,
}

impl HeaderRegion {
    /// The header region of this device.
    pub fn new(device: &Path) -> Self {
        let [a, b] = SLOTS_AT.map(|offset| RegionSlot::new(device, offset, SLOT_LEN));
        Self {
            device: device.to_owned(),
            slots: SlotPair::new(&[FORMAT], a, b),
        }
    }

    /// The path of the device.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// The header of a disk that may be anybody's: nothing is repaired. `None`: there is no valid one.
    pub fn peek(&mut self) -> Option<Header> {
        match self.slots.peek() {
            Ok(Loaded::Value { payload, .. }) => Header::decode(&payload).ok(),
            _ => None,
        }
    }

    /// Reads the header and repairs a damaged slot.
    pub fn read(&mut self) -> Result<HeaderState, HeaderError> {
        // What else is in the region does not matter then, and a mebibyte takes longer to read than the header to write.
        if let Ok(Loaded::Value {
            payload,
            whole: true,
            ..
        }) = self.slots.peek()
        {
            return Ok(header_of(&payload));
        }
        let region = match read_region(&self.device) {
            Ok(region) => region,
            // Possibly a bad sector. One valid slot is enough; without one nothing is known, and
            // the region must not be treated as blank.
            Err(error) => {
                return match self.slots.peek() {
                    Ok(Loaded::Value { payload, .. }) => Ok(header_of(&payload)),
                    _ => Err(io_error(&self.device, "read")(error)),
                };
            }
        };
        if is_zero(&region) {
            return Ok(HeaderState::Blank);
        }
        if let Ok(Loaded::Value { whole: false, .. }) = self.slots.peek()
            && !between_slots(&region).into_iter().all(is_zero)
        {
            // Other software has begun to use the partition, and what looks like a damaged slot is
            // its data: it must not be repaired.
            return Ok(HeaderState::Foreign(
                "one valid header slot, but other content where a header has zeros".to_owned(),
            ));
        }
        Ok(match self.slots.load() {
            Ok(Loaded::Value { payload, .. }) => header_of(&payload),
            Ok(Loaded::NeverCompleted) if is_zero(&region[LONGEST_RECORD..]) => {
                HeaderState::Unfinished
            }
            Ok(_) => HeaderState::Foreign("content where a header has zeros".to_owned()),
            Err(error) => HeaderState::Foreign(error.to_string()),
        })
    }

    /// Writes both slots. The caller has read the region and found a header that may be replaced,
    /// or no content.
    pub fn write(&mut self, header: &Header) -> Result<(), HeaderError> {
        self.slots.save(&header.encode())?;
        Ok(())
    }

    /// Zeroes the region, whatever its content.
    pub fn erase(&mut self) -> Result<(), HeaderError> {
        let device = &self.device;
        let zero = || {
            let file = fs::OpenOptions::new().write(true).open(device)?;
            // From the back: if one valid slot remains, it is the first one.
            file.write_all_at(&vec![0; SLOT_LEN], SLOTS_AT[1])?;
            file.sync_all()?;
            file.write_all_at(&vec![0; REGION as usize], 0)?;
            file.sync_all()
        };
        zero().map_err(io_error(device, "erase"))?;
        // Forget the state of earlier writes.
        *self = Self::new(&self.device);
        Ok(())
    }
}

fn header_of(payload: &[u8]) -> HeaderState {
    match Header::decode(payload) {
        Ok(header) => HeaderState::Header(header),
        Err(why) => HeaderState::Foreign(why),
    }
}

/// In blocks, because a byte at a time takes milliseconds for a whole region.
fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut blocks = bytes.chunks(ZEROS.len());
    blocks.all(|block| *block == ZEROS[..block.len()])
}

/// The parts of the region that belong to no slot.
fn between_slots(region: &[u8]) -> [&[u8]; 2] {
    let [a, b] = SLOTS_AT.map(|at| at as usize);
    [&region[a + SLOT_LEN..b], &region[b + SLOT_LEN..]]
}

fn io_error(device: &Path, step: &'static str) -> impl FnOnce(io::Error) -> HeaderError {
    let device = device.to_owned();
    move |source| HeaderError::Io {
        device,
        step,
        source,
    }
}

fn read_region(device: &Path) -> io::Result<Vec<u8>> {
    let mut region = vec![0; REGION as usize];
    fs::File::open(device)?.read_exact_at(&mut region, 0)?;
    Ok(region)
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::{ClusterUnlockKey, NodeUnlockKey};
    use hearth_api::stored_form;
    use proptest::prelude::*;
    use tempfile::NamedTempFile;

    use super::super::keys::Mode;
    use super::*;

    fn read(device: &Path) -> Result<HeaderState, HeaderError> {
        HeaderRegion::new(device).read()
    }

    fn write(device: &Path, header: &Header) -> Result<(), HeaderError> {
        HeaderRegion::new(device).write(header)
    }

    fn erase(device: &Path) -> Result<(), HeaderError> {
        HeaderRegion::new(device).erase()
    }

    fn owner() -> Owner {
        Owner {
            enrolment_id: EnrolmentId::from_bytes([1; 16]),
            node_id: NodeId::from_bytes([2; 16]),
            cluster_id: ClusterId::from_bytes([3; 16]),
        }
    }

    fn secrets() -> Secrets {
        Secrets {
            mode: Mode::Encrypted,
            node_unlock_key: NodeUnlockKey::from_bytes([4; 32]),
            cluster_unlock_key: ClusterUnlockKey::from_bytes([5; 32]),
            cluster_id: owner().cluster_id,
            node_id: owner().node_id,
            key_epoch: 0,
        }
    }

    fn header(phase: Phase) -> Header {
        Header::new(phase, owner(), [6; 32], Some(&secrets()))
    }

    fn device() -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(4 * REGION).unwrap();
        file
    }

    fn put(device: &NamedTempFile, at: u64, bytes: &[u8]) {
        device.as_file().write_all_at(bytes, at).unwrap();
    }

    #[test]
    fn a_header_reads_back() {
        let device = device();
        assert_eq!(read(device.path()).unwrap(), HeaderState::Blank);
        for phase in [Phase::Initialising, Phase::Ready] {
            write(device.path(), &header(phase)).unwrap();
            assert_eq!(
                read(device.path()).unwrap(),
                HeaderState::Header(header(phase))
            );
        }
        erase(device.path()).unwrap();
        assert_eq!(read(device.path()).unwrap(), HeaderState::Blank);
    }

    #[test]
    fn the_longest_header_is_as_short_as_promised() {
        let record = hearth_sys::slots::encode(&FORMAT, u64::MAX, &header(Phase::Ready).encode());
        assert!(record.len() <= LONGEST_RECORD, "{}", record.len());
    }

    #[test]
    fn either_slot_is_enough_and_none_is_foreign() {
        let device = device();
        write(device.path(), &header(Phase::Ready)).unwrap();
        for slot in SLOTS_AT {
            put(&device, slot, &[0xee; SLOT_LEN]);
            assert_eq!(
                read(device.path()).unwrap(),
                HeaderState::Header(header(Phase::Ready)),
                "the slot at {slot} is damaged, the other one is not"
            );
        }
        for slot in SLOTS_AT {
            put(&device, slot, &[0xee; SLOT_LEN]);
        }
        assert!(matches!(
            read(device.path()).unwrap(),
            HeaderState::Foreign(_)
        ));
    }

    #[test]
    fn a_first_write_that_was_cut_off_is_told_from_foreign_content() {
        let device = device();
        let record = hearth_sys::slots::encode(&FORMAT, 1, b"cut off");
        for length in 1..record.len() {
            put(&device, 0, &[0; SLOT_LEN]);
            put(&device, 0, &record[..length]);
            assert_eq!(
                read(device.path()).unwrap(),
                HeaderState::Unfinished,
                "{length}"
            );
        }
        put(&device, REGION - 1, b"x");
        assert!(matches!(
            read(device.path()).unwrap(),
            HeaderState::Foreign(_)
        ));
    }

    #[test]
    fn other_file_systems_are_foreign() {
        for (at, bytes) in [
            (0, b"XFSB".as_slice()),
            (1080, &[0x53, 0xef]),
            (0x10040, b"_BHRfS_M"),
            (REGION - 1, &[1]),
            (4096, &[1]),
        ] {
            let device = device();
            put(&device, at, bytes);
            assert!(
                matches!(read(device.path()).unwrap(), HeaderState::Foreign(_)),
                "{bytes:?} at {at}"
            );
        }
    }

    /// Some file systems leave the position of the second slot untouched for a long time.
    #[test]
    fn a_file_system_over_a_former_header_is_foreign_and_stays_whole() {
        let device = device();
        write(device.path(), &header(Phase::Ready)).unwrap();
        put(&device, 0, &[0xee; 2 * SLOT_LEN]);
        let before = std::fs::read(device.path()).unwrap();
        assert!(matches!(
            read(device.path()).unwrap(),
            HeaderState::Foreign(_)
        ));
        assert!(std::fs::read(device.path()).unwrap() == before);
    }

    /// A file that ends within the second slot's half simulates a disk with a bad sector there.
    /// FAULTS 14.
    #[test]
    fn a_front_that_cannot_be_read_whole_needs_one_good_slot() {
        let device = device();
        write(device.path(), &header(Phase::Ready)).unwrap();
        device.as_file().set_len(REGION / 2).unwrap();
        assert_eq!(
            read(device.path()).unwrap(),
            HeaderState::Header(header(Phase::Ready))
        );
        put(&device, 0, &[0; SLOT_LEN]);
        assert!(matches!(
            read(device.path()).unwrap_err(),
            HeaderError::Io { step: "read", .. }
        ));
    }

    #[test]
    fn a_device_that_is_too_small_is_an_error() {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(REGION - 1).unwrap();
        assert!(matches!(
            read(file.path()).unwrap_err(),
            HeaderError::Io { step: "read", .. }
        ));
    }

    #[test]
    fn the_mac_covers_every_field_and_both_keys() {
        let right = header(Phase::Ready);
        assert!(right.is_authentic(Some(&secrets())));
        assert!(!right.is_authentic(None), "downgraded to INSECURE");
        let plain = Header::new(Phase::Ready, owner(), [6; 32], None);
        assert!(plain.is_authentic(None));
        assert!(!plain.is_authentic(Some(&secrets())));

        let mut altered = vec![right.clone(); 5];
        altered[0].phase = Phase::Initialising;
        altered[1].owner.enrolment_id = EnrolmentId::from_bytes([9; 16]);
        altered[2].owner.node_id = NodeId::from_bytes([9; 16]);
        altered[3].owner.cluster_id = ClusterId::from_bytes([9; 16]);
        altered[4].salt[31] ^= 1;
        for header in altered {
            assert!(!header.is_authentic(Some(&secrets())), "{header:?}");
        }
        let other_cuk = Secrets {
            cluster_unlock_key: ClusterUnlockKey::from_bytes([0; 32]),
            ..secrets()
        };
        assert!(!right.is_authentic(Some(&other_cuk)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn arbitrary_headers_never_panic(bytes: Vec<u8>) {
            let _ = Header::decode(&bytes);
        }
    }

    /// Writes the header to an empty device and returns the content of its slot.
    fn stored(header: &Header) -> Vec<u8> {
        let device = device();
        write(device.path(), header).unwrap();
        let mut region = read_region(device.path()).unwrap();
        let [a, b] = SLOTS_AT.map(|at| {
            let slot = &mut region[at as usize..][..LONGEST_RECORD];
            let record = slot.to_vec();
            slot.fill(0);
            record
        });
        assert_eq!(a, b);
        assert!(region.iter().all(|byte| *byte == 0), "the rest is zero");
        a
    }

    fn read_stored(record: &[u8], wanted: &Header, secrets: Option<&Secrets>) {
        let device = device();
        for at in SLOTS_AT {
            put(&device, at, record);
        }
        assert_eq!(
            read(device.path()).unwrap(),
            HeaderState::Header(wanted.clone())
        );
        assert!(wanted.is_authentic(secrets));
    }

    /// The slots of a data partition, at their offsets; the rest is zero.
    #[test]
    fn the_stored_form_stays() {
        let of_mode = |mode| Secrets {
            mode,
            key_epoch: 3,
            ..secrets()
        };
        let encrypted = of_mode(Mode::Encrypted);
        let authenticated = of_mode(Mode::AuthenticatedEncrypted);
        let make = |phase, secrets| Header::new(phase, owner(), [6; 32], secrets);
        let made = make(Phase::Initialising, None);
        let record = stored_form!("data-header-initialising-insecure.slot", stored(&made));
        read_stored(&record, &made, None);
        let made = make(Phase::Ready, None);
        let record = stored_form!("data-header-ready-insecure.slot", stored(&made));
        read_stored(&record, &made, None);
        let made = make(Phase::Initialising, Some(&encrypted));
        let record = stored_form!("data-header-initialising-encrypted.slot", stored(&made));
        read_stored(&record, &made, Some(&encrypted));
        let made = make(Phase::Ready, Some(&encrypted));
        let record = stored_form!("data-header-ready-encrypted.slot", stored(&made));
        read_stored(&record, &made, Some(&encrypted));
        let made = make(Phase::Initialising, Some(&authenticated));
        let record = stored_form!("data-header-initialising-authenticated.slot", stored(&made));
        read_stored(&record, &made, Some(&authenticated));
        let made = make(Phase::Ready, Some(&authenticated));
        let record = stored_form!("data-header-ready-authenticated.slot", stored(&made));
        read_stored(&record, &made, Some(&authenticated));
    }
}
