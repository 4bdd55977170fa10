use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::testing::{Script, TestClock, TestCluster, TestCurator};

const LONG: Duration = Duration::from_secs(30);

/// The result of first contact with a curator that has this script.
async fn contact(
    cluster: &Arc<TestCluster>,
    script: Script,
    secret: &FirstContactSecret,
) -> Result<ClusterCa, FirstContactError> {
    let clock = TestClock::new();
    let curator = TestCurator::start(cluster, script, clock.clone()).await;
    let ca = fetch_ca(&curator.endpoint(), secret, LONG, clock).await;
    assert_eq!(curator.calls(), ["GetCACertificate"]);
    ca
}

#[tokio::test]
async fn who_knows_the_secret_comes_to_know_the_ca() {
    let cluster = Arc::new(TestCluster::new());
    let secret = FirstContactSecret::generate();
    let script = || Script {
        first_contact_secret: Some(secret.clone()),
        ..Script::default()
    };
    let ca = contact(&cluster, script(), &secret).await.expect("proven");
    assert_eq!(ca.certificate(), cluster.ca());

    let other = FirstContactSecret::generate();
    let refused = contact(&cluster, script(), &other).await;
    assert!(matches!(refused, Err(FirstContactError::Unproven { .. })));
    let refused = contact(&cluster, Script::default(), &secret).await;
    assert!(matches!(refused, Err(FirstContactError::Ask { .. })));
}

#[tokio::test]
async fn someone_in_between_is_found_out() {
    // It relays request and answer, and belongs to a cluster of its own.
    let (ours, theirs) = (TestCluster::new(), Arc::new(TestCluster::new()));
    let secret = FirstContactSecret::generate();
    let script = Script {
        relayed_ca: Some((ours.ca().to_vec(), secret.clone())),
        ..Script::default()
    };
    let refused = contact(&theirs, script, &secret).await;
    assert!(matches!(refused, Err(FirstContactError::Relayed { .. })));
    // A proven but invalid CA certificate is rejected as well.
    let script = Script {
        relayed_ca: Some((vec![0x30, 0], secret.clone())),
        ..Script::default()
    };
    let refused = contact(&theirs, script, &secret).await;
    assert!(matches!(refused, Err(FirstContactError::Ca { .. })));
}

#[tokio::test]
async fn nobody_there_is_said_so() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let endpoint = Endpoint::from(listener.local_addr().expect("an address"));
    drop(listener);
    let secret = FirstContactSecret::generate();
    let error = fetch_ca(&endpoint, &secret, LONG, TestClock::new())
        .await
        .expect_err("nobody");
    assert!(
        crate::chain(&error).contains(&endpoint.to_string()),
        "{error}"
    );
}

#[test]
fn the_proof_is_what_the_proto_file_says() {
    let secret = FirstContactSecret::from_bytes([9; 32]);
    let mut message = b"hearth first contact v1".to_vec();
    message.push(0);
    message.extend([16, 0, 0, 0]);
    message.extend([7; 16]);
    message.extend(b"certificate");
    let key = hmac::Key::new(hmac::HMAC_SHA256, &[9; 32]);
    let proof = prove(&secret, &[7; 16], b"certificate").expect("a good nonce");
    assert_eq!(proof[..], *hmac::sign(&key, &message).as_ref());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_proof_holds_for_what_it_is_made_of(
        secret: [u8; 32],
        nonce in proptest::collection::vec(any::<u8>(), 0..80),
        ca: Vec<u8>,
        bit in 0_usize..256,
    ) {
        let key = FirstContactSecret::from_bytes(secret);
        let Ok(proof) = prove(&key, &nonce, &ca) else {
            prop_assert!(!(16..=64).contains(&nonce.len()));
            prop_assert!(!proven(&key, &nonce, &ca, &[0; 32]));
            return Ok(());
        };
        prop_assert!(proven(&key, &nonce, &ca, &proof));
        let flip = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let at = bit % (bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            bytes
        };
        prop_assert!(!proven(&key, &nonce, &ca, &flip(&proof)));
        prop_assert!(!proven(&key, &flip(&nonce), &ca, &proof));
        let other = FirstContactSecret::try_from(&flip(&secret)[..]).expect("32 bytes");
        prop_assert!(!proven(&other, &nonce, &ca, &proof));
        prop_assert!(!proven(&key, &nonce, &[&ca[..], b"x"].concat(), &proof));
        prop_assert!(!proven(&key, &nonce, &ca, &proof[..31]));
    }
}
