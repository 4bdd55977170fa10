//! The domains of a lease: option 15, one name as text, and option 119 (RFC 3397), a list of names as in DNS messages,
//! with compression.
//!
//! Only names that a resolver's configuration may contain are taken. A pointer leads to an earlier name only, so that no
//! list makes the decoder run in circles.

/// Maximum number of domains: resolvers look up as many.
pub(crate) const MOST: usize = 6;
const LONGEST_NAME: usize = 253;
const LONGEST_LABEL: usize = 63;
/// The two high bits of the first byte of a pointer.
const POINTER: u8 = 0xc0;

/// The domains of both options, in the order in which names are looked up, each once.
pub(super) fn of(search: Option<&[u8]>, domain: Option<&[u8]>) -> Vec<String> {
    let listed = search.map(list).unwrap_or_default();
    let mut domains: Vec<String> = Vec::new();
    for name in listed.into_iter().chain(domain.and_then(text)) {
        if !domains.contains(&name) && domains.len() < MOST {
            domains.push(name);
        }
    }
    domains
}

fn text(bytes: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(bytes).ok()?;
    valid(name.trim_end_matches(['\0', '.']))
}

fn valid(name: &str) -> Option<String> {
    let label = |label: &str| {
        (1..=LONGEST_LABEL).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    (name.len() <= LONGEST_NAME && name.split('.').all(label)).then(|| name.to_ascii_lowercase())
}

/// The names of a list. Everything after a malformed one is ignored.
pub(crate) fn list(bytes: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    let mut at = 0;
    while at < bytes.len() && names.len() < MOST {
        let Some((name, end)) = name(bytes, at) else {
            break;
        };
        names.extend(valid(&name));
        at = end;
    }
    names
}

/// The name that begins at this offset, and the offset after it.
fn name(bytes: &[u8], start: usize) -> Option<(String, usize)> {
    let mut labels: Vec<&str> = Vec::new();
    let mut at = start;
    // A pointer leads to before this.
    let mut limit = start;
    let mut end = None;
    loop {
        let length = *bytes.get(at)?;
        if length & POINTER == POINTER {
            let low = *bytes.get(at + 1)?;
            end.get_or_insert(at + 2);
            let target = usize::from(u16::from_be_bytes([length & !POINTER, low]));
            if target >= limit {
                return None;
            }
            (at, limit) = (target, target);
            continue;
        }
        if length == 0 {
            let end = end.unwrap_or(at + 1);
            return Some((labels.join("."), end));
        }
        let label = bytes.get(at + 1..at + 1 + usize::from(length))?;
        labels.push(std::str::from_utf8(label).ok()?);
        at += 1 + usize::from(length);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_read_with_their_pointers() {
        // "eng.apple.com", then "marketing" and a pointer to "apple.com": the example of RFC 3397.
        let both = b"\x03eng\x05apple\x03com\x00\x09marketing\xc0\x04";
        assert_eq!(list(both), ["eng.apple.com", "marketing.apple.com"]);
        assert_eq!(
            of(Some(both), Some(b"Apple.com.\0")),
            ["eng.apple.com", "marketing.apple.com", "apple.com"]
        );
        assert_eq!(of(Some(both), Some(b"ENG.apple.com")).len(), 2);
        assert_eq!(of(None, Some(b"x y")), [""; 0]);
        for malformed in [
            &b"\x03eng"[..],
            b"\x03eng\xc0",
            // To itself, forwards, in a circle.
            b"\xc0\x00",
            b"\x01a\xc0\x04\x01b\xc0\x00",
            b"\x01a\xc0\x00",
            b"\x03a b\x00",
            b"\x02\xff\xfe\x00",
            b"\x00",
        ] {
            assert_eq!(list(malformed), [""; 0], "{malformed:?}");
        }
        assert_eq!(list(b"\x01a\x00\x01b"), ["a"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_few_valid_names(bytes in vec(prop_oneof![0..4_u8, Just(b'a'), Just(POINTER), any::<u8>()], 0..40)) {
            let names = of(Some(&bytes), Some(&bytes));
            prop_assert!(names.len() <= MOST);
            for name in names {
                prop_assert_eq!(valid(&name), Some(name));
            }
        }

        #[test]
        fn what_was_encoded_is_read(names in vec(vec("[a-z]{1,8}", 1..4), 0..6)) {
            let mut bytes = Vec::new();
            for label in &names {
                for label in label {
                    bytes.push(label.len() as u8);
                    bytes.extend(label.as_bytes());
                }
                bytes.push(0);
            }
            let names: Vec<String> = names.iter().map(|labels| labels.join(".")).collect();
            prop_assert_eq!(list(&bytes), names);
        }
    }
}
