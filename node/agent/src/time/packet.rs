//! The 48 bytes of NTP (RFC 5905, the header without extensions), as a client sends and reads them.
//!
//! # Why no library
//! `rsntp` 4.1 reads the system clock itself, on both sides of the exchange, so that it can be
//! tested against no other clock; it panics for clocks before 1970, sends the time as the only
//! thing that an attacker who does not see the request has to guess, and keeps neither the distance
//! of the server to its own source nor the precision that a clock in another NTP era needs.
//! `ntp-proto` brings all of NTPv4, NTS and a second provider of cryptography, and is, in its own
//! words, no public interface. What a client needs are the two functions of this file.
//!
//! # What is sent, and what is believed
//! - The transmit timestamp of a request is a random number, not the time. The server returns it,
//!   and an answer without it is not one. Nobody else learns the clock of the node.
//! - Timestamps have 32 bits of seconds, which begin anew in 2036. They are read as the first such
//!   time after the build of the image, so neither the clock of the node nor the era matters.

use std::time::{Duration, SystemTime};

/// Length of a packet without extensions.
pub(super) const LENGTH: usize = 48;

/// Version 4, mode 3 (client), no leap second.
const CLIENT: u8 = 4 << 3 | 3;
const SERVER: u8 = 4;
/// From the begin of NTP's era 0, in 1900, to 1970.
const UNIX_BEGIN: u64 = 2_208_988_800;
/// Seconds in an era.
const ERA: u64 = 1 << 32;
/// Servers above this stratum are not synchronised.
const MOST_STRATUM: u8 = 15;

/// Why a packet is not the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Flaw {
    /// It is too short.
    #[error("expected at least {LENGTH} bytes, got {0}")]
    Short(usize),
    /// It is not a server's packet of version 3 or 4.
    #[error("expected an answer of NTP version 3 or 4, got version {version}, mode {mode}")]
    Kind {
        /// The version.
        version: u8,
        /// The mode.
        mode: u8,
    },
    /// It does not contain the number of the request.
    #[error("not an answer to this request")]
    OtherRequest,
    /// The server does not want to be asked ("kiss of death").
    #[error("the server refuses requests with the code {}", .0.escape_ascii())]
    Refused([u8; 4]),
    /// The server has no time itself.
    #[error("the server is not synchronised (leap indicator {leap}, stratum {stratum})")]
    Unsynchronised {
        /// The leap indicator.
        leap: u8,
        /// The stratum.
        stratum: u8,
    },
    /// It was sent before the request was received.
    #[error("the server's timestamps contradict each other")]
    Contradiction,
}

/// An answer of a synchronised server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// When the server received the request.
    pub received: SystemTime,
    /// How long it took to answer.
    pub took: Duration,
    /// Its own largest error: half the delay to the primary source, and what it adds up.
    pub distance: Duration,
}

/// A request with this number, which nobody must be able to guess.
pub(super) fn request(number: u64) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[0] = CLIENT;
    bytes[40..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Reads the answer to the request with this number. `begin`: no time is before it.
pub(super) fn parse(bytes: &[u8], number: u64, begin: SystemTime) -> Result<Answer, Flaw> {
    let Some(bytes) = bytes.first_chunk::<LENGTH>() else {
        return Err(Flaw::Short(bytes.len()));
    };
    let (leap, version, mode) = (bytes[0] >> 6, bytes[0] >> 3 & 7, bytes[0] & 7);
    if !matches!(version, 3 | 4) || mode != SERVER {
        return Err(Flaw::Kind { version, mode });
    }
    if long(bytes, 24) != number {
        return Err(Flaw::OtherRequest);
    }
    let stratum = bytes[1];
    if stratum == 0 {
        return Err(Flaw::Refused(word(bytes, 12)));
    }
    let (received, sent) = (long(bytes, 32), long(bytes, 40));
    if leap == 3 || stratum > MOST_STRATUM || sent == 0 {
        return Err(Flaw::Unsynchronised { leap, stratum });
    }
    // Correct across the end of an era.
    let took = sent.wrapping_sub(received);
    if took > u64::MAX / 2 {
        return Err(Flaw::Contradiction);
    }
    Ok(Answer {
        received: time(received, begin),
        took: fixed(took, 32),
        distance: short(bytes, 4) / 2 + short(bytes, 8),
    })
}

fn word(bytes: &[u8; LENGTH], at: usize) -> [u8; 4] {
    [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]
}

fn long(bytes: &[u8; LENGTH], at: usize) -> u64 {
    let seconds = u32::from_be_bytes(word(bytes, at));
    let fraction = u32::from_be_bytes(word(bytes, at + 4));
    u64::from(seconds) << 32 | u64::from(fraction)
}

/// 16 bits of seconds and 16 of their fraction.
fn short(bytes: &[u8; LENGTH], at: usize) -> Duration {
    fixed(u32::from_be_bytes(word(bytes, at)).into(), 16)
}

/// A number with this many bits of fraction, in seconds.
fn fixed(number: u64, bits: u32) -> Duration {
    let nanoseconds = (u128::from(number) * 1_000_000_000) >> bits;
    Duration::new(
        (nanoseconds / 1_000_000_000) as u64,
        (nanoseconds % 1_000_000_000) as u32,
    )
}

/// The first time after `begin` with this timestamp.
fn time(timestamp: u64, begin: SystemTime) -> SystemTime {
    let since = begin
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let begin = since.as_secs() + UNIX_BEGIN;
    let seconds = begin + ((timestamp >> 32).wrapping_sub(begin) % ERA) - UNIX_BEGIN;
    let fraction = fixed(timestamp & (ERA - 1), 32);
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + fraction
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::time) fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// The build of the image in these tests: in 2026.
    pub(in crate::time) const BUILD: u64 = 1_790_000_000;

    /// The timestamp of a time.
    fn timestamp(time: SystemTime) -> u64 {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let fraction = (u64::from(since.subsec_nanos()) << 32).div_ceil(1_000_000_000);
        ((since.as_secs() + UNIX_BEGIN) << 32) + fraction
    }

    /// What a server at this time answers to a request, after a millisecond.
    pub(in crate::time) fn answer(request: &[u8], now: SystemTime) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[0] = 4 << 3 | SERVER;
        bytes[1] = 2;
        // Root delay 1/64 s, root dispersion 1/128 s.
        bytes[6] = 4;
        bytes[10] = 2;
        bytes[24..32].copy_from_slice(&request[40..48]);
        bytes[32..40].copy_from_slice(&timestamp(now).to_be_bytes());
        let sent = now + Duration::from_millis(1);
        bytes[40..].copy_from_slice(&timestamp(sent).to_be_bytes());
        bytes
    }

    #[test]
    fn an_answer_says_when_and_how_exactly() {
        let now = at(BUILD + 5) + Duration::from_millis(250);
        let read = parse(&answer(&request(7), now), 7, at(BUILD)).unwrap();
        assert_eq!(read.received, now);
        assert_eq!(read.took.as_millis(), 1);
        assert_eq!(read.distance, Duration::from_micros(15_625));
    }

    #[test]
    fn a_packet_that_is_no_answer_is_refused_with_the_reason() {
        let good = answer(&request(7), at(BUILD));
        let changed = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            parse(&bytes, 7, super::tests::at(BUILD)).unwrap_err()
        };
        assert_eq!(parse(&good[..47], 7, at(BUILD)), Err(Flaw::Short(47)));
        assert_eq!(
            changed(0, 2 << 3 | 4),
            Flaw::Kind {
                version: 2,
                mode: 4
            }
        );
        assert_eq!(
            changed(0, 4 << 3 | 5),
            Flaw::Kind {
                version: 4,
                mode: 5
            }
        );
        assert_eq!(changed(31, 8), Flaw::OtherRequest);
        let flaw = changed(1, 0);
        assert_eq!(flaw, Flaw::Refused([0; 4]));
        for (at, byte, leap, stratum) in [(0, 0xc0 | 4 << 3 | 4, 3, 2), (1, 16, 0, 16)] {
            assert_eq!(changed(at, byte), Flaw::Unsynchronised { leap, stratum });
        }
        // Received after it was sent.
        assert_eq!(changed(35, good[35] + 1), Flaw::Contradiction);
    }

    #[test]
    fn a_refusal_has_its_code() {
        let mut bytes = answer(&request(7), at(BUILD));
        bytes[1] = 0;
        bytes[12..16].copy_from_slice(b"RATE");
        let flaw = parse(&bytes, 7, at(BUILD)).unwrap_err();
        assert_eq!(
            flaw.to_string(),
            "the server refuses requests with the code RATE"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// In whatever era, up to 136 years after the build.
        #[test]
        fn every_time_after_the_build_is_read(build in 0..1u64 << 34, later in 0..ERA, nanoseconds in 0..1_000_000_000u32) {
            let now = at(build + later) + Duration::from_nanos(nanoseconds.into());
            let read = parse(&answer(&request(7), now), 7, at(build)).unwrap();
            prop_assert_eq!(read.received.duration_since(now).unwrap_or_default(), Duration::ZERO);
            prop_assert!(now.duration_since(read.received).unwrap() <= Duration::from_nanos(1));
            prop_assert!(read.took <= Duration::from_millis(2));
        }

        #[test]
        fn arbitrary_packets_are_judged_without_harm(bytes: Vec<u8>, number: u64, build in 0..1u64 << 34) {
            let _ = parse(&bytes, number, at(build));
        }

        /// Without the number of the request nothing is believed.
        #[test]
        fn forged_packets_are_refused(header: [u8; 24], guess: u64, rest: [u8; 16], number: u64) {
            prop_assume!(guess != number);
            let bytes = [&header[..], &guess.to_be_bytes(), &rest].concat();
            prop_assert!(parse(&bytes, number, at(BUILD)).is_err());
        }
    }
}
