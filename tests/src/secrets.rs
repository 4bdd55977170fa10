//! Searches for secrets in places where they must not occur.

use anyhow::ensure;
use base64::Engine;

use crate::Outcome;

/// Shorter ones could occur by chance.
const SHORTEST: usize = 16;

/// Checks that a secret is in none of these texts: not unchanged, nor as hexadecimal digits, base64 or a list of
/// numbers, as `Debug` prints bytes.
///
/// # Errors
/// Names the secret, the text and the encoding.
pub fn in_none<'a>(
    what: &str,
    secret: &[u8],
    texts: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> Outcome {
    ensure!(
        secret.len() >= SHORTEST,
        "{what}: expected a longer secret, got {} bytes",
        secret.len()
    );
    let forms = forms(secret);
    for (name, text) in texts {
        for (form, pattern) in &forms {
            ensure!(
                !contains(text, pattern),
                "{what} occurs in {name}, as {form}"
            );
        }
    }
    Ok(())
}

fn forms(secret: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let numbers: Vec<String> = secret.iter().map(u8::to_string).collect();
    // These characters do not depend on the surrounding bytes, in one of three alignments.
    let base64 = |skip: usize, name| {
        let whole = &secret[skip..skip + (secret.len() - skip) / 3 * 3];
        let text = base64::engine::general_purpose::STANDARD_NO_PAD.encode(whole);
        (name, text.into_bytes())
    };
    vec![
        ("plain bytes", secret.to_vec()),
        ("hexadecimal digits", hex::encode(secret).into_bytes()),
        (
            "upper-case hexadecimal digits",
            hex::encode_upper(secret).into_bytes(),
        ),
        ("numbers", numbers.join(", ").into_bytes()),
        base64(0, "base64"),
        base64(1, "base64, after something"),
        base64(2, "base64, after something"),
    ]
}

fn contains(text: &[u8], pattern: &[u8]) -> bool {
    text.windows(pattern.len()).any(|window| window == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_in_each_form() {
        let secret: Vec<u8> = (200..232).collect();
        let engine = base64::engine::general_purpose::STANDARD;
        let after = |count: usize| [vec![b'x'; count], secret.clone(), b"more".to_vec()].concat();
        let texts = [
            format!("key: {}", hex::encode(&secret)).into_bytes(),
            format!("key: {}", hex::encode_upper(&secret)).into_bytes(),
            format!("key: {secret:?}").into_bytes(),
            engine.encode(&secret).into_bytes(),
            engine.encode(after(1)).into_bytes(),
            engine.encode(after(2)).into_bytes(),
            after(7),
        ];
        for text in texts {
            let shown = String::from_utf8_lossy(&text).into_owned();
            let found = in_none("the key", &secret, [("a text", &text[..])]);
            assert!(found.is_err(), "not found in {shown}");
        }
        let other = hex::encode(vec![7; 32]);
        in_none("the key", &secret, [("a text", other.as_bytes())]).expect("nothing there");
        assert!(in_none("the key", b"short", []).is_err());
    }
}
