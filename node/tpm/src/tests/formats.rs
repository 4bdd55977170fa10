//! Records, signatures and keys as bytes: what is written is read, and anything else is an error.

use proptest::array::{uniform3, uniform32};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair};

use super::{after, ecdsa_key, literal, rsa_key, signatures};
use crate::pcr::Digest;
use crate::sealed::StorageKeyName;
use crate::{
    DecodeError, KeyError, ParseError, Pcr, PcrSelection, PcrSignatures, PcrValues, Policy,
    PolicyKey, Sealed, SignedPolicy, SigningKey, pcr_policy,
};

fn key() -> impl Strategy<Value = PolicyKey> {
    let bytes = |count| vec(any::<u8>(), count);
    let ecdsa = bytes(64).prop_map(|point| PolicyKey::EcdsaP256(point.try_into().unwrap()));
    let rsa = bytes(256).prop_map(|mut modulus| {
        modulus[0] |= 0x80;
        PolicyKey::Rsa2048(Box::new(modulus.try_into().unwrap()))
    });
    prop_oneof![ecdsa, rsa]
}

fn selection() -> impl Strategy<Value = PcrSelection> {
    uniform3(any::<u8>()).prop_map(PcrSelection::from_bits)
}

fn sealed() -> impl Strategy<Value = Sealed> {
    let pcr = (0_u8..24).prop_map(|index| Pcr::new(index).unwrap());
    let digest = || uniform32(any::<u8>()).prop_map(Digest);
    let literal = btree_map(pcr, digest(), 0..5);
    let literal = literal.prop_map(|values| values.into_iter().collect::<PcrValues>());
    let signed = prop::option::of((key(), selection()));
    let private = vec(any::<u8>(), 0..=512);
    let parts = (digest(), digest(), literal, signed, private);
    parts.prop_filter_map("a policy", |(storage, unique, literal, signed, private)| {
        let signed = signed.and_then(|(key, pcrs)| SignedPolicy::new(key, pcrs).ok());
        Some(Sealed {
            storage_key: StorageKeyName(storage),
            unique: unique.0,
            policy: Policy::new(literal.selection(), signed).ok()?,
            literal,
            private,
        })
    })
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(sealed in sealed()) {
        prop_assert_eq!(Sealed::decode(&sealed.encode()), Ok(sealed));
    }

    /// Any bytes, and bytes that are nearly a record: an error, or a record with exactly this encoding.
    #[test]
    fn any_bytes_are_a_record_or_an_error(
        noise in vec(any::<u8>(), 0..300),
        sealed in sealed(),
        at in any::<prop::sample::Index>(),
        bit in 0_u8..8,
        length in any::<prop::sample::Index>(),
    ) {
        let mut changed = sealed.encode();
        *at.get_mut(&mut changed) ^= 1_u8 << bit;
        let truncated = &changed[..length.index(changed.len())];
        for bytes in [&noise[..], &changed, truncated] {
            if let Ok(decoded) = Sealed::decode(bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
        prop_assert_ne!(Sealed::decode(&changed), Ok(sealed));
    }

    #[test]
    fn any_text_is_signatures_or_an_error(noise in vec(any::<u8>(), 0..300), text in ".*") {
        let _ = PcrSignatures::parse(&noise);
        let _ = PcrSignatures::parse(text.as_bytes());
        let _ = PolicyKey::from_pem(&noise);
        let _ = PolicyKey::from_der(&noise);
        let _ = SigningKey::from_pkcs8(&noise);
    }

    #[test]
    fn a_public_key_is_read_as_it_was_written(key in key()) {
        prop_assert_eq!(PolicyKey::from_der(&key.to_der()), Ok(key.clone()));
        prop_assert_eq!(PolicyKey::from_pem(key.to_pem().as_bytes()), Ok(key));
    }

    /// Signatures are made by whoever made the image: what the TPM gets of them is bounded.
    #[test]
    fn any_signature_is_converted_or_an_error(noise in vec(any::<u8>(), 0..100), key in key()) {
        prop_assert!(!key.verifies(b"message", &noise));
        let _ = key.tpm_signature(&noise);
    }
}

#[test]
fn a_record_of_another_release_is_named() {
    let sealed = Sealed {
        storage_key: StorageKeyName(Digest::ZERO),
        unique: [0; 32],
        policy: literal(),
        literal: PcrValues::from_iter([(Pcr::SECURE_BOOT, Digest::ZERO)]),
        private: vec![],
    };
    let mut record = sealed.encode();
    assert_eq!(record.len(), 4 + 1 + 32 + 32 + 3 + 32 + 1 + 2);
    record[4] = 2;
    let error = Sealed::decode(&record).unwrap_err();
    assert_eq!(error, DecodeError::Version(2));
    assert_eq!(
        error.to_string(),
        "sealed record: expected version 1, got 2"
    );
}

#[test]
fn signatures_have_systemds_format() {
    // Up to these offsets, SubjectPublicKeyInfo has the algorithm.
    for (key, bits) in [(ecdsa_key(), 26), (rsa_key(), 24)] {
        let signatures = signatures(&key, b"image");
        let json: serde_json::Value = serde_json::from_str(&signatures.to_json()).unwrap();
        let entry = &json["sha256"][0];
        assert_eq!(entry["pcrs"], serde_json::json!([11]));
        let fingerprint = Digest::of(&[&key.public().to_der()[bits..]]);
        assert_eq!(entry["pkfp"], fingerprint.to_string());
        let policy = pcr_policy(&after(b"image"));
        assert_eq!(entry["pol"], policy.to_string());
        let signature = signatures.iter().next().unwrap();
        assert!(key.public().verifies(&policy.0, &signature.signature));
    }
}

/// `openssl rsa -in rsa.pem -RSAPublicKey_out -outform DER | sha256sum`
#[test]
fn the_fingerprint_is_that_of_openssl() {
    let expected = "fa2044d38d542cff9e3a26993567044a61802cbbf93650d78366d19cc1a97bb3";
    assert_eq!(rsa_key().public().fingerprint().to_string(), expected);
}

/// The same image is built again by whoever has the key.
#[test]
fn signatures_are_the_same_each_time() {
    let made = SigningKey::generate().unwrap();
    for pem in [made.as_bytes(), include_bytes!("rsa.pem")] {
        let [first, second] = [(); 2].map(|()| {
            let key = SigningKey::from_pem(pem).unwrap();
            assert!(
                !key.public()
                    .verifies(b"message", &key.sign(b"another").unwrap())
            );
            signatures(&key, b"image").to_json()
        });
        assert_eq!(first, second);
    }
}

/// The key and the signature of RFC 6979, A.2.5. The key has no public half.
#[test]
fn ecdsa_signatures_are_those_of_the_specification() {
    let private = "c9afa9d845ba75166b5c215767b1d6934e50c3db36e89b127b8a622b120f6721";
    let pkcs8 =
        format!("3041020100301306072a8648ce3d020106082a8648ce3d030107042730250201010420{private}");
    let key = SigningKey::from_pkcs8(&hex::decode(pkcs8).unwrap()).unwrap();
    let PolicyKey::EcdsaP256(point) = key.public() else {
        panic!("{key:?}");
    };
    assert_eq!(
        hex::encode(point),
        "60fed4ba255a9d31c961eb74c6356d68c049b8923b61fa6ce669622e60f29fb6\
         7903fe1008b8bc99a41ae9e95628bc64f2f1b20c2d7e9f5177a3c294d4462299"
    );
    assert_eq!(
        hex::encode(key.sign(b"sample").unwrap()),
        "3046022100efd48b2aacb6a8fd1140dd9cd45e81d69d2c877b56aaf991c34d0ea84eaf3716\
         022100f7cb1c942d657c41d436c7a1b6e29f65f3e900dbb9aff4064dc4ab2f843acda8"
    );
}

#[test]
fn what_systemd_may_add_is_ignored() {
    let digest = "11".repeat(32);
    let json = format!(
        r#"{{"sha1":[{{"pcrs":[11],"pkfp":"","pol":"","sig":""}}],
            "sha256":[{{"pcrs":[11,7],"pkfp":"{digest}","pol":"{digest}","sig":"AAEC","new":1}}]}}"#
    );
    let padded = [json.as_bytes(), &[0; 100]].concat();
    let signatures = PcrSignatures::parse(&padded).unwrap();
    let signature = signatures.iter().next().unwrap();
    assert_eq!(signature.pcrs.to_string(), "PCR 7, 11");
    assert_eq!(signature.signature, [0, 1, 2]);
    let empty = PcrSignatures::parse(b"{}").unwrap();
    assert_eq!(empty, PcrSignatures::default());
}

#[test]
fn wrong_signatures_are_named() {
    let digest = "11".repeat(32);
    let entry = |pcrs: &str, pol: &str, sig: &str| {
        let json = format!(
            r#"{{"sha256":[{{"pcrs":{pcrs},"pkfp":"{digest}","pol":"{pol}","sig":"{sig}"}}]}}"#
        );
        PcrSignatures::parse(json.as_bytes())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        entry("[24]", &digest, ""),
        r#"PCR signatures: sha256[0].pcrs: expected numbers below 24, got "24""#
    );
    assert_eq!(
        entry("[]", &digest, ""),
        r#"PCR signatures: sha256[0].pcrs: expected at least one PCR, got "none""#
    );
    assert_eq!(
        entry("[11]", "1111", ""),
        r#"PCR signatures: sha256[0].pol: expected 64 hexadecimal digits, got "1111""#
    );
    assert_eq!(
        entry("[11]", &digest, "?"),
        r#"PCR signatures: sha256[0].sig: expected base64 of 256 bytes at most, got "?""#
    );
    let large = PcrSignatures::parse(&[b' '; 65537]).unwrap_err();
    assert!(matches!(large, ParseError::Size(65537)), "{large}");
}

#[test]
fn keys_of_other_kinds_are_refused() {
    let key = ecdsa_key();
    let private = SigningKey::generate().unwrap();
    let error = PolicyKey::from_pem(private.as_bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "policy key: expected one PEM block \"PUBLIC KEY\" (SubjectPublicKeyInfo), got \"PRIVATE KEY\""
    );
    let mut compressed = key.public().to_der();
    compressed[26] = 2;
    let error = PolicyKey::from_der(&compressed).unwrap_err();
    assert!(matches!(error, KeyError::Kind(_)), "{error}");
    let padded = [key.public().to_pem().as_bytes(), &[0; 30]].concat();
    assert_eq!(PolicyKey::from_pem(&padded).as_ref(), Ok(key.public()));
}

#[test]
fn private_keys_of_other_kinds_are_refused() {
    let refused = |text: &[u8]| SigningKey::from_pem(text).unwrap_err();
    let of = |der: &[u8]| pem::encode(&pem::Pem::new("PRIVATE KEY", der));
    assert!(matches!(refused(b""), KeyError::Pem { .. }));
    assert_eq!(
        refused(rsa_key().public().to_pem().as_bytes()).to_string(),
        "policy key: expected one PEM block \"PRIVATE KEY\" (PKCS #8, not encrypted), got \"PUBLIC KEY\""
    );
    let nonsense = refused(of(b"nonsense").as_bytes());
    assert!(matches!(nonsense, KeyError::Pkcs8(_)), "{nonsense}");

    let random = SystemRandom::new();
    let ed25519 = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
    let error = refused(of(ed25519.as_ref()).as_bytes()).to_string();
    assert!(error.ends_with("got the algorithm 1.3.101.112"), "{error}");
    let p384 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P384_SHA384_ASN1_SIGNING, &random).unwrap();
    let error = refused(of(p384.as_ref()).as_bytes()).to_string();
    assert!(error.contains("got an elliptic curve's key ("), "{error}");
}
