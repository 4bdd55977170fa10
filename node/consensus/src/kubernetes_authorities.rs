//! Kubernetes' certificate authorities, stored in etcd.
//!
//! They are one record, created by the first node that needs it. If two nodes create it at the same
//! time, each write requires that the record does not exist: one succeeds, the other reads the
//! result. A record that exists but cannot be read is an error, and is never replaced.

use hearth_host::pki::Lifetime;
use hearth_host::pki::kubernetes::{Authorities, KubernetesPkiError};
use zeroize::Zeroizing;

use crate::fenced::{Condition, Write, WriteError};
use crate::{ConsensusError, NamespacedClient};

/// The record's key, in the namespace of [`ConsensusUser::KubernetesPki`](crate::ConsensusUser).
const AUTHORITIES_KEY: &str = "authorities";
/// Maximum number of attempts: a node that loses the race to create the record reads it next.
const WRITE_ATTEMPTS: usize = 3;

/// Why the authorities are not available.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// etcd failed.
    #[error("cannot read or create Kubernetes' certificate authorities")]
    Consensus(#[from] ConsensusError),
    /// The record exists and then does not: something deletes it.
    #[error("Kubernetes' certificate authorities disappear while they are read")]
    Vanishing,
    /// They cannot be generated, or the stored record cannot be decoded.
    #[error(transparent)]
    Pki(#[from] KubernetesPkiError),
}

/// Reads the authorities, or creates them if there are none.
///
/// `client` is that of [`ConsensusUser::KubernetesPki`](crate::ConsensusUser). `cluster_ca` is the
/// cluster CA's certificate in DER; new authorities get its lifetime.
pub async fn ensure(
    client: &NamespacedClient,
    cluster_ca: &[u8],
) -> Result<Authorities, AuthoritiesError> {
    for _ in 0..WRITE_ATTEMPTS {
        if let Some(record) = client.get(AUTHORITIES_KEY).await? {
            return Ok(Authorities::decode(&Zeroizing::new(record.value))?);
        }
        let lifetime = Lifetime::of(cluster_ca).map_err(KubernetesPkiError::from)?;
        let made = Authorities::make(lifetime)?;
        let write = Write::when(Condition::Absent(AUTHORITIES_KEY.into()))
            .put(AUTHORITIES_KEY, made.encode().to_vec());
        match client.write(write).await {
            Ok(_) => {
                tracing::info!("created Kubernetes' certificate authorities");
                return Ok(made);
            }
            Err(WriteError::Conflict) => {}
            Err(WriteError::Consensus(error)) => return Err(error.into()),
        }
    }
    Err(AuthoritiesError::Vanishing)
}

#[cfg(test)]
mod tests {
    use hearth_base::testing::within_timeout;

    use super::*;
    use crate::ConsensusUser;
    use crate::testing::{Running, Site};

    async fn started() -> (Site, Running, NamespacedClient) {
        let site = Site::new();
        let etcd = site.start(true).await;
        let root = etcd.handle();
        let client = root.root().namespaced(ConsensusUser::KubernetesPki);
        (site, etcd, client)
    }

    fn ca_of(site: &Site) -> Vec<u8> {
        let authorities = hearth_host::pki::load(&site.root.data.etcd(), site.cluster_id);
        authorities.unwrap().cluster.certificate().to_vec()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_comes_first_makes_them_and_all_others_take_these() {
        let (site, etcd, client) = started().await;
        let ca = ca_of(&site);
        let together = (0..8).map(|_| ensure(&client, &ca));
        let found = within_timeout("authorities", futures::future::join_all(together)).await;
        let pems: Vec<_> = found.into_iter().map(|a| a.unwrap().ca_pem()).collect();
        assert!(pems.iter().all(|pem| *pem == pems[0]));
        let later = ensure(&client, &ca).await.unwrap();
        assert_eq!(later.ca_pem(), pems[0]);
        assert_eq!(later.lifetime(), Lifetime::of(&ca).unwrap());
        // Created once, written once, at the key that every release reads.
        let record = client.get("authorities").await.unwrap().unwrap();
        assert_eq!(record.create_revision, record.mod_revision);
        etcd.stop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_spoilt_is_never_made_anew() {
        let (site, etcd, client) = started().await;
        let ca = ca_of(&site);
        let corrupt = Write::when(Condition::Absent(AUTHORITIES_KEY.into()))
            .put(AUTHORITIES_KEY, b"\xff".to_vec());
        client.write(corrupt).await.unwrap();
        let error = ensure(&client, &ca).await;
        assert!(matches!(
            error,
            Err(AuthoritiesError::Pki(KubernetesPkiError::Spoilt(_)))
        ));
        let record = client.get(AUTHORITIES_KEY).await.unwrap().unwrap();
        assert_eq!(record.value, b"\xff");
        etcd.stop().await;
    }
}
