//! Kubernetes' certificate authorities, in etcd.
//!
//! They are one record, made once by whoever needs it first. Two who make it at
//! the same moment do so by a write that demands that there is none: one wins,
//! the other takes what it finds. What is there but cannot be read is an error,
//! and is never made anew.

use hearth_host::pki::Lifetime;
use hearth_host::pki::kubernetes::{Authorities, KubernetesPkiError};
use zeroize::Zeroizing;

use crate::fenced::{Condition, Write, WriteError};
use crate::{ConsensusError, NamespacedClient};

/// Where the record is, in the part of
/// [`ConsensusUser::KubernetesPki`](crate::ConsensusUser).
const AUTHORITIES_KEY: &str = "authorities";
/// Looks at the record: whoever loses the race to make it finds it.
const WRITE_ATTEMPTS: usize = 3;

/// Why there are no authorities.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// They are in etcd.
    #[error("Kubernetes' authorities")]
    Consensus(#[from] ConsensusError),
    /// They are there, then they are not: somebody deletes them.
    #[error("Kubernetes' authorities vanish while they are read")]
    Vanishing,
    /// They cannot be made, or what is stored cannot be read.
    #[error(transparent)]
    Pki(#[from] KubernetesPkiError),
}

/// Reads them, or makes them if there are none.
///
/// `client` is that of
/// [`ConsensusUser::KubernetesPki`](crate::ConsensusUser); `cluster_ca` the
/// certificate, DER, of the cluster's authority, whose lifetime new ones get.
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
                tracing::info!("made Kubernetes' certificate authorities");
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
    use hearth_base::testing::soon;

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
        let found = soon("authorities", futures::future::join_all(together)).await;
        let pems: Vec<_> = found.into_iter().map(|a| a.unwrap().ca_pem()).collect();
        assert!(pems.iter().all(|pem| *pem == pems[0]));
        let later = ensure(&client, &ca).await.unwrap();
        assert_eq!(later.ca_pem(), pems[0]);
        assert_eq!(later.lifetime(), Lifetime::of(&ca).unwrap());
        // Made once, written once, at the key that every release reads.
        let record = client.get("authorities").await.unwrap().unwrap();
        assert_eq!(record.create_revision, record.mod_revision);
        etcd.stop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_spoilt_is_never_made_anew() {
        let (site, etcd, client) = started().await;
        let ca = ca_of(&site);
        let spoilt = Write::when(Condition::Absent(AUTHORITIES_KEY.into()))
            .put(AUTHORITIES_KEY, b"\xff".to_vec());
        client.write(spoilt).await.unwrap();
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
