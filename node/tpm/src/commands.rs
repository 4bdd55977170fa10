//! The commands that seal and unseal, each as a function that writes its parameters and reads its response.
//!
//! TPM 2.0 library, part 3 has the commands, part 2 the structures.

use zeroize::Zeroizing;

use super::channel::{Authorization, Channel, Command, Error};
use super::key::{PolicyKey, name_of};
use super::pcr::{Digest, PcrSelection, PcrValues, SHA256};
use super::sealed::{MAX_PRIVATE, Sealed, StorageKeyName, public_area};
use super::session::{Point, Salt, Secret, Session, nonce};
use super::wire::{Malformed, Reader, Writer};

/// The owner hierarchy, TPM_RH_OWNER.
pub(crate) const OWNER: u32 = 0x4000_0001;
/// The endorsement hierarchy, TPM_RH_ENDORSEMENT.
pub(crate) const ENDORSEMENT: u32 = 0x4000_000b;
/// No key or hierarchy, TPM_RH_NULL.
pub(crate) const NULL_HANDLE: u32 = 0x4000_0007;
/// No algorithm, TPM_ALG_NULL.
pub(crate) const NULL: u16 = 0x0010;
const AES: u16 = 0x0006;
const CFB: u16 = 0x0043;

/// The largest secret that a TPM has to seal (MAX_SYM_DATA).
pub const MAX_SECRET: usize = 128;
/// A bound for structures of a response that are not used.
const MAX_UNUSED: usize = 1024;
/// How many random bytes are asked for at once: all TPMs give as many as their largest digest has, if not more.
const RANDOM_AT_ONCE: usize = 32;

/// The storage key, while it is loaded.
pub(crate) struct StorageKey {
    pub(crate) handle: u32,
    pub(crate) name: StorageKeyName,
    /// The name as the TPM writes it.
    full_name: [u8; 34],
    point: Point,
}

/// A key of a hierarchy, while it is loaded.
pub(crate) struct Primary {
    pub(crate) handle: u32,
    pub(crate) point: Point,
    /// The name as the TPM writes it.
    full_name: [u8; 34],
}

/// What a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SessionKind {
    Hmac = 0,
    Policy = 1,
    #[cfg(test)]
    Trial = 3,
}

/// What TPM2_Create returns.
pub(crate) struct Created {
    pub(crate) unique: [u8; 32],
    pub(crate) private: Vec<u8>,
    /// The digest over the values of the PCRs that were named, at that moment.
    pub(crate) pcrs: Digest,
}

/// A key that is derived from the seed of a hierarchy, always the same one. All are on P-256, made and kept by the TPM
/// (fixedTPM, fixedParent, sensitiveDataOrigin), and restricted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Template {
    /// Decrypts, userWithAuth, noDA: TCG's provisioning guidance, and the same as systemd's.
    Storage,
    /// Decrypts, by a policy: L-2 of TCG's "EK Credential Profile", for which manufacturers issue certificates.
    Endorsement,
    /// Signs (ECDSA with SHA-256), userWithAuth, noDA.
    Attestation,
}

impl Template {
    fn hierarchy(self) -> u32 {
        match self {
            Self::Storage => OWNER,
            Self::Endorsement | Self::Attestation => ENDORSEMENT,
        }
    }

    /// The public area, up to the point.
    fn start(self) -> Writer {
        const ECC: u16 = 0x0023;
        const P256: u16 = 0x0003;
        const ECDSA: u16 = 0x0018;
        let area = |attributes| Writer::new().u16(ECC).u16(SHA256).u32(attributes);
        let decrypts = |area: Writer| area.u16(AES).u16(128).u16(CFB).u16(NULL);
        let area = match self {
            Self::Storage => decrypts(area(0x0003_0472).sized(&[])),
            Self::Endorsement => decrypts(area(0x0003_00b2).sized(&endorsement_policy().0)),
            Self::Attestation => area(0x0005_0472)
                .sized(&[])
                .u16(NULL)
                .u16(ECDSA)
                .u16(SHA256),
        };
        area.u16(P256).u16(NULL)
    }

    /// The point in the template, of which the key depends like on everything else.
    fn point(self) -> Point {
        let coordinate = match self {
            Self::Storage | Self::Attestation => Vec::new(),
            Self::Endorsement => vec![0; 32],
        };
        Point {
            x: coordinate.clone(),
            y: coordinate,
        }
    }
}

/// Whoever uses the endorsement key has to have the authorization of its hierarchy (PolicySecret).
fn endorsement_policy() -> Digest {
    let command = (Command::PolicySecret as u32).to_be_bytes();
    let secret = Digest::ZERO.0;
    let named = Digest::of(&[&secret, &command, &ENDORSEMENT.to_be_bytes()]);
    Digest::of(&[&named.0])
}

impl Point {
    /// The public area of the key with this point.
    pub(crate) fn public_area(&self, template: Template) -> Vec<u8> {
        self.write(template.start()).finish().to_vec()
    }
}

/// Gives errors in a response the command's name.
pub(crate) fn read<T>(
    command: Command,
    parse: impl FnOnce() -> Result<T, Malformed>,
) -> Result<T, Error> {
    parse().map_err(|source| Error::Response { command, source })
}

impl Channel {
    /// Derives a key from the seed of its hierarchy. It is the same one until that seed changes.
    pub(crate) fn create_primary(&mut self, template: Template) -> Result<Primary, Error> {
        let command = Command::CreatePrimary;
        let public = template.point().public_area(template);
        // No authorization value and no data; no outside information, no PCRs.
        let sensitive = Writer::new().sized(&[]).sized(&[]).finish();
        let parameters = Writer::new().sized(&sensitive).sized(&public);
        let parameters = parameters.sized(&[]).u32(0);
        let (handles, password) = ([template.hierarchy()], Authorization::EmptyPassword);
        let response = self.execute(command, &handles, parameters, password)?;
        read(command, || {
            let public = Reader::new(&response.parameters).sized("public area", MAX_UNUSED)?;
            let mut reader = Reader::new(public);
            reader.expect("public area", &template.start().finish())?;
            let point = Point::read(&mut reader)?;
            reader.end()?;
            Ok(Primary {
                handle: response.handle,
                full_name: name_of(public),
                point,
            })
        })
    }

    /// The storage key.
    pub(crate) fn storage_key(&mut self) -> Result<StorageKey, Error> {
        let Primary {
            handle,
            full_name,
            point,
        } = self.create_primary(Template::Storage)?;
        let mut digest = Digest::ZERO;
        digest.0.copy_from_slice(&full_name[2..]);
        Ok(StorageKey {
            handle,
            name: StorageKeyName(digest),
            full_name,
            point,
        })
    }

    /// Starts a session whose key only the holder of the storage key can know.
    pub(crate) fn start_session(
        &mut self,
        key: &StorageKey,
        kind: SessionKind,
    ) -> Result<Session, Error> {
        let command = Command::StartAuthSession;
        let of_session = |source| Error::Session { command, source };
        let salt = Salt::for_key(&key.point).map_err(of_session)?;
        let nonce_caller = nonce().map_err(of_session)?;
        let parameters = Writer::new().sized(&nonce_caller).sized(&salt.encrypted);
        let parameters = parameters.u8(kind as u8).u16(AES).u16(128).u16(CFB);
        let parameters = parameters.u16(SHA256);
        let response = self.plain(command, &[key.handle, NULL_HANDLE], parameters)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let nonce_tpm = reader.sized("nonce of the TPM", nonce_caller.len())?;
            reader.end()?;
            Ok(Session::new(
                response.handle,
                &salt,
                &nonce_caller,
                nonce_tpm,
            ))
        })
    }

    /// Seals `secret` below the storage key, to the policy with this digest. `session` ends.
    pub(crate) fn create(
        &mut self,
        key: &StorageKey,
        session: &Session,
        secret: &[u8],
        policy: &Digest,
        pcrs: PcrSelection,
    ) -> Result<Created, Error> {
        let command = Command::Create;
        let sensitive = Writer::new().sized(&[]).sized(secret).finish();
        let parameters = Writer::new().sized(&sensitive);
        let parameters = parameters.sized(&public_area(policy, &[])).sized(&[]);
        let authorization = Authorization::Session {
            session,
            names: &[&key.full_name],
            secret: Secret::InCommand,
        };
        let parameters = pcrs.write(parameters);
        let response = self.execute(command, &[key.handle], parameters, authorization)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let private = reader.sized("private area", MAX_PRIVATE)?;
            let public = reader.sized("public area", MAX_UNUSED)?;
            let mut creation = Reader::new(reader.sized("creation data", MAX_UNUSED)?);
            let without_unique = public_area(policy, &[]);
            let mut public = Reader::new(public);
            // Up to the size of what is empty in the template.
            public.expect("public area", &without_unique[..without_unique.len() - 2])?;
            let mut unique = Reader::new(public.sized("unique", 32)?);
            public.end()?;
            let named = PcrSelection::read(&mut creation)?;
            if named != pcrs {
                let error = Malformed::new("creation PCRs", pcrs.to_string(), named.to_string());
                return Err(error);
            }
            let digest = creation.sized("digest of the creation PCRs", 32)?;
            Ok(Created {
                unique: unique.array("unique")?,
                private: private.to_vec(),
                pcrs: if pcrs.is_empty() {
                    PcrValues::default().digest()
                } else {
                    Digest(Reader::new(digest).array("digest of the creation PCRs")?)
                },
            })
        })
    }

    /// Loads a sealed object below the storage key.
    pub(crate) fn load(&mut self, key: &StorageKey, sealed: &Sealed) -> Result<u32, Error> {
        let parameters = Writer::new().sized(&sealed.private);
        let parameters = parameters.sized(&sealed.public_area());
        let authorization = Authorization::EmptyPassword;
        let response = self.execute(Command::Load, &[key.handle], parameters, authorization)?;
        Ok(response.handle)
    }

    /// The secret of a loaded object, if the policy of `session` is that of the object. `session` ends.
    pub(crate) fn unseal(
        &mut self,
        object: u32,
        name: &[u8],
        session: &Session,
    ) -> Result<Zeroizing<Vec<u8>>, Error> {
        let command = Command::Unseal;
        let authorization = Authorization::Session {
            session,
            names: &[name],
            secret: Secret::InResponse,
        };
        let response = self.execute(command, &[object], Writer::new(), authorization)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let secret = reader.sized("secret", MAX_SECRET)?;
            reader.end()?;
            Ok(Zeroizing::new(secret.to_vec()))
        })
    }

    /// Demands that PCRs have these values, now and when the policy is used.
    pub(crate) fn policy_pcr(&mut self, session: u32, values: &PcrValues) -> Result<(), Error> {
        let parameters = Writer::new().sized(&values.digest().0);
        let parameters = values.selection().write(parameters);
        self.plain(Command::PolicyPcr, &[session], parameters)?;
        Ok(())
    }

    /// Replaces `approved`, which the session's policy has to be, by the name of the key that has signed it.
    pub(crate) fn policy_authorize(
        &mut self,
        session: u32,
        approved: &Digest,
        key: &PolicyKey,
        ticket: &[u8],
    ) -> Result<(), Error> {
        let parameters = Writer::new().sized(&approved.0).sized(&[]);
        let parameters = parameters.sized(&key.name()).bytes(ticket);
        self.plain(Command::PolicyAuthorize, &[session], parameters)?;
        Ok(())
    }

    /// Loads a public key. Its hierarchy is the one whose proof is in tickets that it verifies.
    pub(crate) fn load_external(&mut self, key: &PolicyKey) -> Result<u32, Error> {
        let parameters = Writer::new()
            .sized(&[])
            .sized(&key.public_area())
            .u32(OWNER);
        let response = self.plain(Command::LoadExternal, &[], parameters)?;
        Ok(response.handle)
    }

    /// Has the TPM verify a signature over `message`. The ticket says that it did.
    pub(crate) fn verify_signature(
        &mut self,
        handle: u32,
        message: &Digest,
        signature: &[u8],
    ) -> Result<Vec<u8>, Error> {
        const VERIFIED: u16 = 0x8022;
        let command = Command::VerifySignature;
        let hash = Digest::of(&[&message.0]);
        let parameters = Writer::new().sized(&hash.0).bytes(signature);
        let response = self.plain(command, &[handle], parameters)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            reader.expect("tag of the ticket", &VERIFIED.to_be_bytes())?;
            reader.u32("hierarchy of the ticket")?;
            reader.sized("digest of the ticket", 64)?;
            reader.end()?;
            Ok(response.parameters.to_vec())
        })
    }

    /// The values of PCRs. A TPM returns as many at once as it likes.
    pub(crate) fn pcr_read(&mut self, pcrs: PcrSelection) -> Result<PcrValues, Error> {
        let command = Command::PcrRead;
        let mut values = Vec::new();
        let mut missing = pcrs;
        while !missing.is_empty() {
            let response = self.plain(command, &[], missing.write(Writer::new()))?;
            let returned = read(command, || {
                let mut reader = Reader::new(&response.parameters);
                reader.u32("update counter")?;
                let returned = PcrSelection::read(&mut reader)?;
                if returned.is_empty() || !returned.without(missing).is_empty() {
                    let expected = format!("some of {missing} in a bank of SHA-256");
                    return Err(Malformed::new("PCRs", expected, returned.to_string()));
                }
                let count = u32::try_from(returned.len()).unwrap_or(u32::MAX);
                reader.expect("number of values", &count.to_be_bytes())?;
                for pcr in returned.iter() {
                    reader.expect("size of a value", &[0, 32])?;
                    values.push((pcr, Digest(reader.array("value of a PCR")?)));
                }
                reader.end()?;
                Ok(returned)
            })?;
            missing = missing.without(returned);
        }
        Ok(values.into_iter().collect())
    }

    /// Up to 32 random bytes, at least one.
    pub(crate) fn get_random(&mut self, count: usize) -> Result<Zeroizing<Vec<u8>>, Error> {
        let command = Command::GetRandom;
        let count = count.clamp(1, RANDOM_AT_ONCE);
        let asked = u16::try_from(count).unwrap_or(u16::MAX);
        let response = self.plain(command, &[], Writer::new().u16(asked))?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let bytes = reader.sized("random bytes", count)?;
            reader.end()?;
            if bytes.is_empty() {
                return Err(Malformed::new("random bytes", "at least one", "none"));
            }
            Ok(Zeroizing::new(bytes.to_vec()))
        })
    }

    /// Properties of the TPM (TPM_CAP_TPM_PROPERTIES) from `first` on: numbers and values.
    pub(crate) fn properties(&mut self, first: u32) -> Result<Vec<(u32, u32)>, Error> {
        const PROPERTIES: u32 = 6;
        const AT_ONCE: u32 = 32;
        let command = Command::GetCapability;
        let parameters = Writer::new().u32(PROPERTIES).u32(first).u32(AT_ONCE);
        let response = self.plain(command, &[], parameters)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            reader.u8("more data")?;
            reader.expect("capability", &PROPERTIES.to_be_bytes())?;
            let count = reader.u32("number of properties")?;
            if count > AT_ONCE {
                let expected = format!("{AT_ONCE} at most");
                let error = Malformed::new("number of properties", expected, count.to_string());
                return Err(error);
            }
            let mut property = |_| Ok((reader.u32("property")?, reader.u32("value")?));
            let properties = (0..count)
                .map(&mut property)
                .collect::<Result<_, Malformed>>()?;
            reader.end()?;
            Ok(properties)
        })
    }

    /// The digest of a session's policy so far.
    #[cfg(test)]
    pub(crate) fn policy_get_digest(&mut self, session: u32) -> Result<Digest, Error> {
        let command = Command::PolicyGetDigest;
        let response = self.plain(command, &[session], Writer::new())?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            reader.expect("size of the digest", &[0, 32])?;
            let digest = Digest(reader.array("digest")?);
            reader.end()?;
            Ok(digest)
        })
    }

    /// Extends a PCR, as firmware and loaders do.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn pcr_extend(
        &mut self,
        pcr: super::pcr::Pcr,
        measurement: &Digest,
    ) -> Result<(), Error> {
        let parameters = Writer::new().u32(1).u16(SHA256).bytes(&measurement.0);
        let handle = u32::from(pcr.index());
        let authorization = Authorization::EmptyPassword;
        self.execute(Command::PcrExtend, &[handle], parameters, authorization)?;
        Ok(())
    }

    /// Clears the owner hierarchy, as an operator can in the firmware's menus.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn clear(&mut self) -> Result<(), Error> {
        const LOCKOUT: u32 = 0x4000_000a;
        let authorization = Authorization::EmptyPassword;
        self.execute(Command::Clear, &[LOCKOUT], Writer::new(), authorization)?;
        Ok(())
    }
}
