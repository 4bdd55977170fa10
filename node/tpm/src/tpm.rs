//! What the node asks of a TPM. Each call leaves nothing loaded.

use std::path::Path;
use std::{fmt, io};

use zeroize::Zeroizing;

use super::channel::{Channel, Error, Retries};
use super::code::ResponseCode;
use super::commands::{MAX_SECRET, SessionKind, StorageKey};
use super::pcr::{Digest, PcrDifference, PcrSelection, PcrValues};
use super::pcrsig::{PcrSignature, PcrSignatures};
use super::policy::{Policy, SignedPolicy, pcr_policy};
use super::sealed::{Sealed, StorageKeyName};
use super::session::Session;
use super::transport::{Device, Transport};

/// Why a secret was not sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// A TPM seals 1 to 128 bytes.
    #[error("secret: expected 1 to {MAX_SECRET} bytes, got {0}")]
    Length(usize),
    /// The TPM is not the one that [`Tpm::expect_storage_key`] has named.
    #[error(transparent)]
    OtherTpm(#[from] OtherTpm),
    /// PCRs were extended meanwhile, or something on the way to the TPM has changed the values that were read.
    #[error("PCRs: expected {read}, as read before, got others when the secret was sealed")]
    PcrsChanged {
        /// The values that were read.
        read: PcrValues,
    },
    /// A command failed.
    #[error(transparent)]
    Command(#[from] Error),
}

/// Why a secret was not released.
#[derive(Debug, thiserror::Error)]
pub enum UnsealError {
    /// The secret was sealed by another TPM, or the TPM was cleared since. It is lost as far as the TPM is concerned.
    #[error(transparent)]
    OtherTpm(#[from] OtherTpm),
    /// Literal PCRs do not have the values that they had: at least one.
    #[error("the machine was booted in another state than the one sealed to: {}", list(.0))]
    PcrsDiffer(Vec<PcrDifference>),
    /// There is no signature by the policy's key for the values of the signed PCRs: the image is of another builder, was
    /// changed, or brought no signature.
    #[error("expected a signature by key {key} for {found}, got none among {available}")]
    NoSignature {
        /// The fingerprint of the key that has to sign.
        key: Digest,
        /// The values of the signed PCRs.
        found: PcrValues,
        /// How many signatures there were.
        available: usize,
    },
    /// There is a signature for these values that names the policy's key, which has not made it.
    #[error("the signature by key {key} for {found} is not valid")]
    InvalidSignature {
        /// The fingerprint of the key that has to sign.
        key: Digest,
        /// The values of the signed PCRs.
        found: PcrValues,
    },
    /// Too many wrong authorizations, by whomever. [`Tpm::lockout`] says how long it lasts.
    #[error("the TPM is locked out after too many wrong authorizations")]
    LockedOut(#[source] Error),
    /// A command failed for another reason, or the TPM was not reached.
    #[error(transparent)]
    Command(Error),
}

impl From<Error> for UnsealError {
    fn from(error: Error) -> Self {
        match error.code() {
            Some(ResponseCode::LOCKOUT) => Self::LockedOut(error),
            _ => Self::Command(error),
        }
    }
}

fn list(differences: &[PcrDifference]) -> String {
    let each: Vec<String> = differences.iter().map(PcrDifference::to_string).collect();
    each.join("; ")
}

/// The storage key has another name than it should: another TPM, or one that was cleared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("another TPM, or one that was cleared: expected the storage key {expected}, got {found}")]
pub struct OtherTpm {
    /// The storage key below which the secret was sealed.
    pub expected: StorageKeyName,
    /// The storage key of this TPM.
    pub found: StorageKeyName,
}

/// Who made the TPM. Nothing of this is authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Four characters that the TCG has registered, such as `IBM` or `INTC`.
    pub manufacturer: String,
    /// The manufacturer's own text.
    pub vendor: String,
    /// The version of the firmware: two numbers of 32 bits, whose format the manufacturer defines.
    pub firmware: [u32; 2],
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            manufacturer,
            vendor,
            firmware: [high, low],
        } = self;
        write!(
            f,
            "{manufacturer} ({vendor}), firmware {high:08x}.{low:08x}"
        )
    }
}

/// Whether the TPM refuses authorization values, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lockout {
    /// It refuses all objects that are protected against guessing. A sealed secret of this crate is not one of them.
    pub is_locked: bool,
    /// How many wrong authorizations it remembers.
    pub failed_tries: u32,
    /// From how many on it refuses.
    pub max_tries: u32,
    /// After how many seconds it forgets one.
    pub forgets_after_seconds: u32,
}

/// A TPM 2.0.
pub struct Tpm {
    channel: Channel,
    expected: Option<StorageKeyName>,
}

impl Tpm {
    /// The TPM behind a transport.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_retries(transport, Retries::default())
    }

    /// The TPM behind a transport, waited for in another way than usual.
    pub fn with_retries(transport: impl Transport + 'static, retries: Retries) -> Self {
        Self {
            channel: Channel::new(Box::new(transport), retries),
            expected: None,
        }
    }

    /// The machine's TPM, by the kernel's resource manager.
    pub fn open() -> io::Result<Self> {
        Ok(Self::new(Device::open(Path::new(Device::PATH))?))
    }

    /// Has [`Tpm::seal`] refuse any other TPM.
    ///
    /// A secret is encrypted to the storage key. The first time, whoever controls the way to the TPM could present a key
    /// of their own; from then on, records have the key's name: [`Tpm::unseal`] checks it always, and a node that seals
    /// again gives it here.
    pub fn expect_storage_key(&mut self, name: StorageKeyName) {
        self.expected = Some(name);
    }

    /// Seals a secret of 1 to 128 bytes to the values that the literal PCRs have now, and to the signed part.
    pub fn seal(&mut self, secret: &[u8], policy: &Policy) -> Result<Sealed, SealError> {
        if !(1..=MAX_SECRET).contains(&secret.len()) {
            return Err(SealError::Length(secret.len()));
        }
        let expected = self.expected;
        self.call(|channel| {
            let key = channel.storage_key()?;
            is_same(&key, expected.unwrap_or(key.name))?;
            let literal = channel.pcr_read(policy.pcrs())?;
            let session = channel.start_session(&key, SessionKind::Hmac)?;
            let digest = policy.digest(&literal);
            let created = channel.create(&key, &session, secret, &digest, policy.pcrs())?;
            // The session authenticates this digest, as it does not authenticate the values that were read.
            if created.pcrs != literal.digest() {
                return Err(SealError::PcrsChanged { read: literal });
            }
            Ok(Sealed {
                storage_key: key.name,
                unique: created.unique,
                policy: policy.clone(),
                literal,
                private: created.private,
            })
        })
    }

    /// Releases a sealed secret. `signatures` are those of the image that was booted.
    pub fn unseal(
        &mut self,
        sealed: &Sealed,
        signatures: Option<&PcrSignatures>,
    ) -> Result<Zeroizing<Vec<u8>>, UnsealError> {
        self.call(|channel| {
            let key = channel.storage_key()?;
            is_same(&key, sealed.storage_key)?;
            let literal = &sealed.literal;
            let differences = literal.differences(&channel.pcr_read(literal.selection())?);
            if !differences.is_empty() {
                return Err(UnsealError::PcrsDiffer(differences));
            }
            let approval = match sealed.policy.signed() {
                Some(signed) => Some(approve(channel, signed, signatures)?),
                None => None,
            };
            let session = channel.start_session(&key, SessionKind::Policy)?;
            if let Some(approval) = approval {
                approval.apply(channel, &session)?;
            }
            if !literal.selection().is_empty() {
                channel.policy_pcr(session.handle, literal)?;
            }
            let object = channel.load(&key, sealed)?;
            Ok(channel.unseal(object, &sealed.name(), &session)?)
        })
    }

    /// The name of this TPM's storage key.
    pub fn storage_key(&mut self) -> Result<StorageKeyName, Error> {
        self.call(|channel| channel.storage_key().map(|key| key.name))
    }

    /// Random bytes of the TPM. They pass in clear, and whoever controls the way to the TPM can choose them: mix them with
    /// those of the system, never use them alone.
    pub fn random(&mut self, len: usize) -> Result<Zeroizing<Vec<u8>>, Error> {
        self.call(|channel| {
            let mut bytes = Zeroizing::new(Vec::with_capacity(len));
            while bytes.len() < len {
                let more = channel.get_random(len - bytes.len())?;
                bytes.extend_from_slice(&more);
            }
            Ok(bytes)
        })
    }

    /// The values of PCRs. They are not authenticated: good for a message, not for a decision about others.
    pub fn pcr_values(&mut self, pcrs: PcrSelection) -> Result<PcrValues, Error> {
        self.call(|channel| channel.pcr_read(pcrs))
    }

    /// Who made the TPM.
    pub fn identity(&mut self) -> Result<Identity, Error> {
        const MANUFACTURER: u32 = 0x105;
        const VENDOR: [u32; 4] = [0x106, 0x107, 0x108, 0x109];
        const FIRMWARE: [u32; 2] = [0x10b, 0x10c];
        let properties = self.call(|channel| channel.properties(MANUFACTURER))?;
        Ok(Identity {
            manufacturer: text(&properties, &[MANUFACTURER]),
            vendor: text(&properties, &VENDOR),
            firmware: FIRMWARE.map(|number| value(&properties, number)),
        })
    }

    /// Whether the TPM refuses authorization values.
    pub fn lockout(&mut self) -> Result<Lockout, Error> {
        const PERMANENT: u32 = 0x200;
        const IN_LOCKOUT: u32 = 1 << 9;
        let properties = self.call(|channel| channel.properties(PERMANENT))?;
        Ok(Lockout {
            is_locked: value(&properties, PERMANENT) & IN_LOCKOUT != 0,
            failed_tries: value(&properties, 0x20e),
            max_tries: value(&properties, 0x20f),
            forgets_after_seconds: value(&properties, 0x210),
        })
    }

    /// Runs commands on a TPM where nothing is loaded, and leaves nothing loaded.
    pub(crate) fn call<T, E: From<Error>>(
        &mut self,
        commands: impl FnOnce(&mut Channel) -> Result<T, E>,
    ) -> Result<T, E> {
        self.channel.sweep()?;
        let result = commands(&mut self.channel);
        self.channel.release();
        result
    }
}

fn is_same(key: &StorageKey, expected: StorageKeyName) -> Result<(), OtherTpm> {
    let found = key.name;
    if found == expected {
        return Ok(());
    }
    Err(OtherTpm { expected, found })
}

/// A signature for the current values of the signed PCRs, which the TPM has verified.
struct Approval<'a> {
    signed: &'a SignedPolicy,
    values: PcrValues,
    ticket: Vec<u8>,
}

impl Approval<'_> {
    /// The signed part of a policy.
    fn apply(&self, channel: &mut Channel, session: &Session) -> Result<(), Error> {
        channel.policy_pcr(session.handle, &self.values)?;
        let approved = pcr_policy(&self.values);
        let key = self.signed.key();
        channel.policy_authorize(session.handle, &approved, key, &self.ticket)
    }
}

/// Finds the signature for the current values of the signed PCRs, and has the TPM verify it.
fn approve<'a>(
    channel: &mut Channel,
    signed: &'a SignedPolicy,
    signatures: Option<&PcrSignatures>,
) -> Result<Approval<'a>, UnsealError> {
    let values = channel.pcr_read(signed.pcrs())?;
    let policy = pcr_policy(&values);
    let key = signed.key();
    let invalid = || UnsealError::InvalidSignature {
        key: key.fingerprint(),
        found: values.clone(),
    };
    let matching: Vec<&PcrSignature> = signatures
        .iter()
        .flat_map(|all| all.matching(key, &values))
        .collect();
    if matching.is_empty() {
        return Err(UnsealError::NoSignature {
            key: key.fingerprint(),
            found: values,
            available: signatures.map_or(0, |all| all.iter().count()),
        });
    }
    let valid = matching
        .iter()
        .find(|one| key.verifies(&policy.0, &one.signature));
    let signature = valid.ok_or_else(invalid)?;
    let signature = key.tpm_signature(&signature.signature);
    let signature = signature.map_err(|_| invalid())?;
    let handle = channel.load_external(key)?;
    let ticket = channel.verify_signature(handle, &policy, &signature);
    let ticket = ticket.map_err(|error| match error.code().map(ResponseCode::kind) {
        Some(ResponseCode::SIGNATURE) => invalid(),
        _ => error.into(),
    })?;
    // Some TPMs have room for three objects only; without this one, two are needed at a time.
    channel.flush(handle)?;
    Ok(Approval {
        signed,
        values,
        ticket,
    })
}

/// The value of a property; zero where the TPM does not have it.
fn value(properties: &[(u32, u32)], number: u32) -> u32 {
    let found = properties.iter().find(|(property, _)| *property == number);
    found.map_or(0, |(_, value)| *value)
}

/// The printable characters of properties.
fn text(properties: &[(u32, u32)], numbers: &[u32]) -> String {
    let bytes = numbers
        .iter()
        .flat_map(|number| value(properties, *number).to_be_bytes());
    let printable = bytes.filter(|byte| byte.is_ascii_graphic() || *byte == b' ');
    let text: String = printable.map(char::from).collect();
    text.trim().to_owned()
}
