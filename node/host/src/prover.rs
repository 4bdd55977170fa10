//! Proves to curators what this machine has booted, where the cluster asks for it ([`hearth_tpm::attestation`]).
//!
//! A machine without a TPM never asks for a challenge. The curator then says that the cluster needs one, if it does.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use hearth_api::identity::PublicKey;
use hearth_api::v1::boot_proof::Event;
use hearth_api::v1::{BootProof, GetChallengeRequest, GetChallengeResponse};
use hearth_base::supervisor::spawn_blocking;
use hearth_tpm::attestation::{Asked, QUOTED};
use hearth_tpm::boot_log::{self, BootEvent};
use hearth_tpm::{Malformed, Tpm};

/// The event log of the firmware, from the kernel.
const LOG: &str = "/sys/kernel/security/tpm0/binary_bios_measurements";

/// Why nothing can be proven.
#[derive(Debug, thiserror::Error)]
pub enum ProverError {
    /// The challenge is malformed.
    #[error("GetChallenge: invalid response: nonce: expected 32 bytes, got {0}")]
    Challenge(usize),
    /// The TPM refused.
    #[error("the TPM does not answer the challenge")]
    Tpm(#[from] hearth_tpm::Error),
    /// The firmware's log cannot be read.
    #[error("cannot read the event log {}", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The firmware's log is malformed.
    #[error("event log {}: {source}", path.display())]
    MalformedLog {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Malformed,
    },
}

/// The TPM and the log of this machine.
pub struct Prover {
    tpm: Mutex<Tpm>,
    log: PathBuf,
}

impl Prover {
    /// Of this machine; `None` if it has no TPM.
    ///
    /// # Errors
    /// If it has one that cannot be opened.
    pub fn of_machine() -> io::Result<Option<Self>> {
        match Tpm::open() {
            Ok(tpm) => Ok(Some(Self::new(tpm, Path::new(LOG)))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// With any TPM and log.
    pub fn new(tpm: Tpm, log: &Path) -> Self {
        Self {
            tpm: Mutex::new(tpm),
            log: log.to_owned(),
        }
    }

    /// What was measured into the registers of a quote.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn events(self: &Arc<Self>) -> Result<Vec<BootEvent>, ProverError> {
        self.aside(Self::read_events).await
    }

    fn read_events(&self) -> Result<Vec<BootEvent>, ProverError> {
        let path = || self.log.clone();
        let log = fs::read(&self.log).map_err(|source| ProverError::Log {
            path: path(),
            source,
        })?;
        boot_log::events(&log, QUOTED).map_err(|source| ProverError::MalformedLog {
            path: path(),
            source,
        })
    }

    /// What to call GetChallenge with.
    ///
    /// # Errors
    /// If the TPM refuses.
    pub async fn keys(self: &Arc<Self>) -> Result<GetChallengeRequest, ProverError> {
        self.aside(Self::read_keys).await
    }

    /// The proof for the next call to the curator whose GetChallenge `ask` calls, which has the key `caller`; `None` if
    /// the cluster asks for none. `ask` returns `None` if the curator, of an earlier release, does not know the call.
    ///
    /// # Errors
    /// Those of `ask`; if the TPM refuses, or the log cannot be read.
    pub async fn proof<E: From<ProverError>, F>(
        self: &Arc<Self>,
        caller: PublicKey,
        ask: impl Fn(GetChallengeRequest) -> F,
    ) -> Result<Option<BootProof>, E>
    where
        F: Future<Output = Result<Option<GetChallengeResponse>, E>>,
    {
        // First whether it asks at all: a TPM takes a second to tell its keys.
        let first = ask(GetChallengeRequest::default()).await?;
        if !first.is_some_and(|challenge| challenge.required) {
            return Ok(None);
        }
        match ask(self.keys().await?).await? {
            Some(challenge) => Ok(self.answer(challenge, caller).await?),
            None => Ok(None),
        }
    }

    /// The answer to a challenge, for a call to the same curator with the key `caller`; `None` if nothing is asked.
    ///
    /// # Errors
    /// If the TPM refuses, or the log cannot be read.
    pub async fn answer(
        self: &Arc<Self>,
        challenge: GetChallengeResponse,
        caller: PublicKey,
    ) -> Result<Option<BootProof>, ProverError> {
        if !challenge.required {
            return Ok(None);
        }
        let asked = asked(challenge)?;
        let prove = move |own: &Self| own.prove(&asked, &caller);
        self.aside(prove).await.map(Some)
    }

    /// The value of the TPM's counter ([`Tpm::count`]); `None` if it has none yet.
    ///
    /// # Errors
    /// If the TPM refuses.
    pub async fn counter(self: &Arc<Self>) -> Result<Option<u64>, ProverError> {
        self.aside(|own| Ok(own.tpm().counter()?)).await
    }

    /// Counts with the TPM's counter, and returns the new value.
    ///
    /// # Errors
    /// If the TPM refuses.
    pub async fn count(self: &Arc<Self>) -> Result<u64, ProverError> {
        self.aside(|own| Ok(own.tpm().count()?)).await
    }

    fn tpm(&self) -> MutexGuard<'_, Tpm> {
        self.tpm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what blocks on a thread of its own: a TPM takes up to a second for a command.
    async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ProverError> + Send + 'static,
    ) -> Result<T, ProverError> {
        let own = self.clone();
        match spawn_blocking(move || work(&own)).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn read_keys(&self) -> Result<GetChallengeRequest, ProverError> {
        let mut tpm = self.tpm();
        let (endorsement, attestation) = tpm.attestation_keys()?;
        Ok(GetChallengeRequest {
            endorsement_key: endorsement.to_bytes(),
            attestation_key: attestation.to_bytes(),
            endorsement_certificate: tpm.endorsement_certificate()?.unwrap_or_default(),
        })
    }

    fn prove(&self, asked: &Asked, caller: &PublicKey) -> Result<BootProof, ProverError> {
        let events = self.read_events()?;
        let mut tpm = self.tpm();
        let proof = tpm.attest(asked, caller.as_bytes())?;
        let event = |event: &BootEvent| Event {
            pcr: event.pcr.index().into(),
            digest: event.digest.0.to_vec(),
        };
        Ok(BootProof {
            secret: proof.secret,
            quote: proof.quote.attested,
            signature: proof.quote.signature.to_vec(),
            events: events.iter().map(event).collect(),
        })
    }
}

fn asked(challenge: GetChallengeResponse) -> Result<Asked, ProverError> {
    let nonce = challenge.nonce;
    let length = nonce.len();
    Ok(Asked {
        nonce: nonce
            .try_into()
            .map_err(|_| ProverError::Challenge(length))?,
        credential: challenge.credential,
        encrypted_seed: challenge.encrypted_seed,
    })
}
