//! The commands of attestation.

use super::{AttestationKey, EndorsementKey, Quote};
use crate::attestation::{Asked, QUOTED};
use crate::channel::{Authorization, Channel, Command, Error};
use crate::code::ResponseCode;
#[cfg(any(test, feature = "testing"))]
use crate::commands::OWNER;
use crate::commands::{ENDORSEMENT, NULL, NULL_HANDLE, Primary, Template, read};
use crate::pcr::{Digest, SHA256};
use crate::session::nonce;
use crate::wire::{Malformed, Reader, Writer};

/// Where the certificate of the endorsement key is, by TCG's "EK Credential Profile": that of template L-2.
const CERTIFICATE: u32 = 0x01c0_000a;
/// How many bytes are read at once, which every TPM can.
const READ_AT_ONCE: u16 = 512;
/// The largest certificate that is read, in bytes. They have less than 2 KiB.
const MAX_CERTIFICATE: u16 = 4096;
/// The largest secret in a credential.
const MAX_SECRET: usize = 64;

impl Channel {
    /// The keys, loaded.
    pub(super) fn endorsement_key(&mut self) -> Result<(u32, EndorsementKey), Error> {
        let Primary { handle, point, .. } = self.create_primary(Template::Endorsement)?;
        Ok((handle, EndorsementKey(point)))
    }

    pub(super) fn attestation_key(&mut self) -> Result<(u32, AttestationKey), Error> {
        let Primary { handle, point, .. } = self.create_primary(Template::Attestation)?;
        Ok((handle, AttestationKey(point)))
    }

    /// Decrypts the secret of a credential. Who listens on the way to the TPM learns it: it proves where it was decrypted,
    /// and nothing is protected with it.
    pub(super) fn activate(
        &mut self,
        attestation: u32,
        endorsement: u32,
        asked: &Asked,
    ) -> Result<Vec<u8>, Error> {
        let command = Command::ActivateCredential;
        let policy = self.start_policy_session()?;
        self.policy_secret(policy)?;
        let parameters = Writer::new().sized(&asked.credential);
        let parameters = parameters.sized(&asked.encrypted_seed);
        let handles = [attestation, endorsement];
        let authorization = Authorization::PasswordAndPolicy(policy);
        let response = self.execute(command, &handles, parameters, authorization)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let secret = reader.sized("secret", MAX_SECRET)?;
            reader.end()?;
            Ok(secret.to_vec())
        })
    }

    /// Has the TPM sign the values of [`QUOTED`], with these data.
    pub(super) fn quote(&mut self, key: u32, qualifying: &Digest) -> Result<Quote, Error> {
        const ECDSA: u16 = 0x0018;
        const MAX_ATTESTED: usize = 1024;
        let command = Command::Quote;
        // In the key's own scheme.
        let parameters = Writer::new().sized(&qualifying.0).u16(NULL);
        let parameters = QUOTED.write(parameters);
        let response = self.execute(command, &[key], parameters, Authorization::EmptyPassword)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let attested = reader.sized("quote", MAX_ATTESTED)?.to_vec();
            reader.expect("scheme of the signature", &ECDSA.to_be_bytes())?;
            reader.expect("hash of the signature", &SHA256.to_be_bytes())?;
            let mut signature = [0; 64];
            for half in signature.chunks_exact_mut(32) {
                let number = reader.sized("signature", 32)?;
                half[32 - number.len()..].copy_from_slice(number);
            }
            reader.end()?;
            Ok(Quote {
                attested,
                signature,
            })
        })
    }

    /// The certificate that the manufacturer has left in the TPM: DER, perhaps with bytes after it.
    pub(super) fn endorsement_certificate(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let size = match self.nv_size(CERTIFICATE) {
            Ok(size) => size,
            Err(error) if error.code().map(ResponseCode::kind) == Some(ResponseCode::HANDLE) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut content = Vec::with_capacity(size.into());
        while content.len() < usize::from(size) {
            let at = u16::try_from(content.len()).unwrap_or(u16::MAX);
            let more = self.nv_read(CERTIFICATE, READ_AT_ONCE.min(size - at), at)?;
            content.extend_from_slice(&more);
        }
        Ok(Some(content))
    }

    fn nv_size(&mut self, index: u32) -> Result<u16, Error> {
        let command = Command::NvReadPublic;
        let response = self.plain(command, &[index], Writer::new())?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let mut public = Reader::new(reader.sized("public area", MAX_SECRET * 4)?);
            public.expect("index", &index.to_be_bytes())?;
            public.bytes("hash and attributes", 2 + 4)?;
            public.sized("policy", MAX_SECRET)?;
            let size = public.u16("size")?;
            public.end()?;
            if size > MAX_CERTIFICATE {
                let expected = format!("{MAX_CERTIFICATE} bytes at most");
                return Err(Malformed::new("certificate", expected, size.to_string()));
            }
            Ok(size)
        })
    }

    fn nv_read(&mut self, index: u32, size: u16, at: u16) -> Result<Vec<u8>, Error> {
        let command = Command::NvRead;
        let parameters = Writer::new().u16(size).u16(at);
        let password = Authorization::EmptyPassword;
        let response = self.execute(command, &[index, index], parameters, password)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let bytes = reader.sized("content", size.into())?;
            reader.end()?;
            if bytes.is_empty() {
                return Err(Malformed::new("content", "at least one byte", "none"));
            }
            Ok(bytes.to_vec())
        })
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn store_certificate(&mut self, certificate: &[u8]) -> Result<(), Error> {
        // Written by the owner; read by whoever knows its empty authorization value, which is not guessed (noDA).
        const ATTRIBUTES: u32 = 1 << 1 | 1 << 18 | 1 << 25;
        let size = u16::try_from(certificate.len()).unwrap_or(u16::MAX);
        let public = Writer::new().u32(CERTIFICATE).u16(SHA256).u32(ATTRIBUTES);
        let public = public.sized(&[]).u16(size).finish();
        let parameters = Writer::new().sized(&[]).sized(&public);
        let command = Command::NvDefineSpace;
        self.execute(command, &[OWNER], parameters, Authorization::EmptyPassword)?;
        for (number, part) in certificate.chunks(READ_AT_ONCE.into()).enumerate() {
            let at = READ_AT_ONCE * u16::try_from(number).unwrap_or(u16::MAX);
            let parameters = Writer::new().sized(part).u16(at);
            let handles = [OWNER, CERTIFICATE];
            let password = Authorization::EmptyPassword;
            self.execute(Command::NvWrite, &handles, parameters, password)?;
        }
        Ok(())
    }

    /// Starts a session that protects nothing: for the policy of the endorsement key.
    fn start_policy_session(&mut self) -> Result<u32, Error> {
        const POLICY: u8 = 1;
        let command = Command::StartAuthSession;
        let nonce_caller = nonce().map_err(|source| Error::Session { command, source })?;
        let parameters = Writer::new().sized(&nonce_caller).sized(&[]);
        let parameters = parameters.u8(POLICY).u16(NULL).u16(SHA256);
        let response = self.plain(command, &[NULL_HANDLE, NULL_HANDLE], parameters)?;
        Ok(response.handle)
    }

    /// Shows the session the authorization of the endorsement hierarchy, which is empty.
    fn policy_secret(&mut self, session: u32) -> Result<(), Error> {
        let parameters = Writer::new().sized(&[]).sized(&[]).sized(&[]).u32(0);
        let handles = [ENDORSEMENT, session];
        let password = Authorization::EmptyPassword;
        self.execute(Command::PolicySecret, &handles, parameters, password)?;
        Ok(())
    }
}
