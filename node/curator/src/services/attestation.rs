//! Challenges: what machines are asked before they register, join or renew their certificates, under the admission policy
//! KNOWN_IMAGES.
//!
//! A challenge is kept in the memory of the curator that made it, for one caller and one answer. If the answer reaches
//! another curator, or comes too late, the machine is told to ask again. Anybody may ask, so the number of challenges is
//! limited, and of those for keys that nobody knows the rate as well.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_api::identity::PublicKey;
use hearth_api::server::Caller;
use hearth_api::v1::boot_proof::Event;
use hearth_api::v1::{BootProof, GetChallengeRequest, GetChallengeResponse};
use hearth_cluster::decisions::admission::{self, Admission, Proven};
use hearth_cluster::decisions::{Rejection, registration};
use hearth_cluster::state::Endorsement;
use hearth_host::pki;
use hearth_tpm::attestation::{
    AttestationKey, Challenge, ChallengeError, EndorsementKey, Proof, Quote,
};
use hearth_tpm::boot_log::{BootEvent, MAX_EVENTS};
use hearth_tpm::{Digest, Pcr};
use tokio::time::Instant;
use tonic::{Request, Status};

use crate::budget::{Bucket, Rate};
use crate::core::Core;

/// How long a challenge can be answered. A TPM takes a few seconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Maximum number of challenges that wait for an answer; the oldest one makes room.
const MOST_CHALLENGES: usize = 256;
/// Challenges for callers with unknown keys, all together.
const OF_STRANGERS: Rate = Rate {
    burst: 32,
    every: Duration::from_millis(500),
};
/// The largest certificate of an endorsement key, in bytes.
const LARGEST_CERTIFICATE: usize = 4096;
/// The largest secret of a proof, in bytes: a wrong one is not longer than the right one.
const SECRET: usize = 32;

/// The challenges of this curator.
pub(super) struct Attestation {
    core: Arc<Core>,
    strangers: Bucket,
    asked: Mutex<HashMap<PublicKey, Asked>>,
}

/// A challenge that waits for an answer.
struct Asked {
    challenge: Challenge,
    endorsement: Endorsement,
    at: Instant,
}

impl Attestation {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            strangers: Bucket::new(OF_STRANGERS),
            asked: Mutex::default(),
        }
    }

    pub(super) async fn challenge(
        &self,
        request: Request<GetChallengeRequest>,
    ) -> Result<GetChallengeResponse, Status> {
        let key = Caller::of(&request)?.public_key()?;
        let request = request.into_inner();
        let configuration = self.core.loaded_cluster().await?.content.configuration;
        if !admission::is_required(&configuration) {
            return Ok(GetChallengeResponse::default());
        }
        if request.endorsement_key.is_empty() && request.attestation_key.is_empty() {
            return Ok(GetChallengeResponse {
                required: true,
                ..GetChallengeResponse::default()
            });
        }
        if !self.is_known(&key) && !self.strangers.take() {
            return Err(Rejection::TooManyChallenges.into());
        }
        let (endorsement, attestation_key) = keys(request)?;
        let challenge = Challenge::new(&endorsement.key, &attestation_key);
        let challenge = challenge.map_err(|error| match error {
            ChallengeError::EndorsementKey(why) => {
                Status::from(field("endorsement_key", "a point on P-256", why))
            }
            ChallengeError::Random(_) => Status::internal(error.to_string()),
        })?;
        let asked = challenge.asked().clone();
        self.keep(
            key,
            Asked {
                challenge,
                endorsement,
                at: Instant::now(),
            },
        );
        Ok(GetChallengeResponse {
            required: true,
            nonce: asked.nonce.to_vec(),
            credential: asked.credential,
            encrypted_seed: asked.encrypted_seed,
        })
    }

    /// What the caller with this key has proven, and whether that is enough. `None` if the cluster asks for nothing.
    pub(super) fn admit(
        &self,
        key: &PublicKey,
        proof: Option<BootProof>,
    ) -> Result<Option<Admission>, Status> {
        let configuration = self.core.cluster()?.content.configuration;
        if !admission::is_required(&configuration) {
            return Ok(None);
        }
        let proven = proof.map(|proof| self.verify(key, proof)).transpose()?;
        let trusted = self.core.cache.images();
        let trusted = trusted.iter().map(|trusted| &trusted.content.image);
        Ok(admission::decide(&configuration, proven, trusted)?)
    }

    fn verify(&self, key: &PublicKey, proof: BootProof) -> Result<Proven, Rejection> {
        let events = events(&proof.events)?;
        let proof = Proof {
            secret: sized("proof.secret", "32 bytes", proof.secret, SECRET)?,
            quote: Quote {
                attested: proof.quote,
                signature: (&proof.signature[..])
                    .try_into()
                    .map_err(|_| field("proof.signature", "64 bytes", proof.signature.len()))?,
            },
        };
        let asked = self.lock().remove(key);
        let asked = asked.filter(|asked| asked.at.elapsed() < ANSWER_WITHIN);
        let asked = asked.ok_or(Rejection::NoChallenge)?;
        asked.challenge.verify(key.as_bytes(), &proof, &events)?;
        Ok(Proven {
            endorsement: asked.endorsement,
            events,
        })
    }

    /// Whether a node of this cluster has this key, to register, to join or to renew its certificates.
    fn is_known(&self, key: &PublicKey) -> bool {
        let cache = &self.core.cache;
        cache.join_key_of(key).is_some() || cache.node(registration::id_of(key)).is_some()
    }

    fn keep(&self, key: PublicKey, asked: Asked) {
        let mut all = self.lock();
        all.retain(|_, asked| asked.at.elapsed() < ANSWER_WITHIN);
        if all.len() >= MOST_CHALLENGES {
            let oldest = all.iter().min_by_key(|(_, asked)| asked.at);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                all.remove(&oldest);
            }
        }
        all.insert(key, asked);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PublicKey, Asked>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The TPM's keys. A certificate has to be that of the endorsement key.
fn keys(request: GetChallengeRequest) -> Result<(Endorsement, AttestationKey), Rejection> {
    let point = "a point on P-256 as TPMS_ECC_POINT";
    let key = EndorsementKey::from_bytes(&request.endorsement_key)
        .map_err(|error| field("endorsement_key", point, error))?;
    let attestation_key = AttestationKey::from_bytes(&request.attestation_key)
        .map_err(|error| field("attestation_key", point, error))?;
    let certificate = sized(
        "endorsement_certificate",
        "at most 4096 bytes",
        request.endorsement_certificate,
        LARGEST_CERTIFICATE,
    )?;
    if !certificate.is_empty() {
        let wanted = "an X.509 certificate of the endorsement key, in DER";
        let field = |found: &str| field("endorsement_certificate", wanted, found);
        let certified = pki::key_of(&certificate).map_err(|_| field("other bytes"))?;
        if certified != key.uncompressed() {
            return Err(field("one of another key"));
        }
    }
    Ok((Endorsement { key, certificate }, attestation_key))
}

fn events(events: &[Event]) -> Result<Vec<BootEvent>, Rejection> {
    if events.len() > MAX_EVENTS {
        return Err(field("proof.events", "at most 256", events.len()));
    }
    let event = |event: &Event| {
        let pcr = u8::try_from(event.pcr).ok().and_then(Pcr::new);
        let digest = <[u8; 32]>::try_from(&event.digest[..]);
        Ok(BootEvent {
            pcr: pcr.ok_or_else(|| field("proof.events.pcr", "below 24", event.pcr))?,
            digest: digest
                .map(Digest)
                .map_err(|_| field("proof.events.digest", "32 bytes", event.digest.len()))?,
        })
    };
    events.iter().map(event).collect()
}

fn sized(
    name: &'static str,
    wanted: &'static str,
    bytes: Vec<u8>,
    most: usize,
) -> Result<Vec<u8>, Rejection> {
    match bytes.len() {
        length if length > most => Err(field(name, wanted, length)),
        _ => Ok(bytes),
    }
}

fn field(field: &'static str, wanted: &'static str, found: impl ToString) -> Rejection {
    Rejection::Field {
        field,
        wanted,
        found: found.to_string(),
    }
}
