//! Generated logs, and cuts of them: what is promised is kept, what is later is not, and tears are between sectors.

use std::collections::HashSet;
use std::io;

use proptest::prelude::*;

use crate::{Cut, Disk, Kind, Log, LogError, NotACut, Pick, Replay, ReplayError, Source};

const SECTOR: usize = 512;
const DISK_SECTORS: u64 = 24;

/// A disk or a log in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bytes(Vec<u8>);

impl Source for Bytes {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let part = self.0.get(at as usize..at as usize + buffer.len());
        buffer.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Disk for Bytes {
    fn write(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        let part = self.0.get_mut(at as usize..at as usize + bytes.len());
        part.ok_or(io::ErrorKind::UnexpectedEof)?
            .copy_from_slice(bytes);
        Ok(())
    }
}

/// A request to the disk.
#[derive(Clone, Copy, Debug)]
enum Request {
    Write {
        sector: u64,
        sectors: u64,
        fua: bool,
    },
    Discard {
        sector: u64,
        sectors: u64,
    },
    Flush,
}

/// The log of these requests. The data of the n-th one is its number from 1, so that a sector shows who wrote it.
fn record(requests: &[Request]) -> Bytes {
    let header = |numbers: [u64; 4]| {
        let mut sector: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        sector.resize(SECTOR, 0);
        sector
    };
    let count = requests.len() as u64;
    let mut log = header([0x006a_7366_7773_6872, 1, count, SECTOR as u64]);
    for (number, request) in (1..).zip(requests) {
        match *request {
            Request::Write {
                sector,
                sectors,
                fua,
            } => {
                log.extend(header([sector, sectors, if fua { 2 } else { 0 }, 0]));
                log.extend(vec![number; sectors as usize * SECTOR]);
            }
            Request::Discard { sector, sectors } => log.extend(header([sector, sectors, 4, 0])),
            Request::Flush => log.extend(header([0, 0, 1, 0])),
        }
    }
    Bytes(log)
}

fn parse(log: &Bytes) -> Result<Log, LogError> {
    Log::parse(log, DISK_SECTORS * SECTOR as u64)
}

fn empty_disk() -> Bytes {
    Bytes(vec![0; DISK_SECTORS as usize * SECTOR])
}

fn image(log: &Log, source: &Bytes, cut: Cut) -> Bytes {
    let mut replay = Replay::new(source.clone(), empty_disk());
    replay.cut(log, cut).unwrap();
    replay.disk().clone()
}

/// Who wrote each sector last; fails if one is of two writers.
fn writers(disk: &Bytes) -> Vec<u8> {
    let sectors = disk.0.chunks_exact(SECTOR);
    sectors
        .map(|sector| {
            assert!(
                sector.iter().all(|byte| *byte == sector[0]),
                "a torn sector"
            );
            sector[0]
        })
        .collect()
}

/// The disk after these requests, without any cut.
fn after(requests: &[Request]) -> Vec<u8> {
    let mut disk = vec![0; DISK_SECTORS as usize];
    for (number, request) in (1..).zip(requests) {
        let (sector, sectors, value) = match *request {
            Request::Write {
                sector, sectors, ..
            } => (sector, sectors, number),
            Request::Discard { sector, sectors } => (sector, sectors, 0),
            Request::Flush => continue,
        };
        disk[sector as usize..(sector + sectors) as usize].fill(value);
    }
    disk
}

prop_compose! {
    fn place()(sector in 0..DISK_SECTORS, sectors in 1..8u64) -> (u64, u64) {
        (sector, sectors.min(DISK_SECTORS - sector))
    }
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        6 => place().prop_map(|(sector, sectors)| Request::Write { sector, sectors, fua: false }),
        1 => place().prop_map(|(sector, sectors)| Request::Write { sector, sectors, fua: true }),
        1 => place().prop_map(|(sector, sectors)| Request::Discard { sector, sectors }),
        3 => Just(Request::Flush),
    ]
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    proptest::collection::vec(request(), 0..40)
}

fn pick() -> impl Strategy<Value = Pick> {
    prop_oneof![
        Just(Pick::None),
        Just(Pick::All),
        any::<u64>().prop_map(Pick::Seed)
    ]
}

fn is_promise(request: &Request) -> bool {
    matches!(request, Request::Flush | Request::Write { fua: true, .. })
}

proptest! {
    /// Each sector is of a writer that may have written it last: none that an earlier promise has replaced, and none
    /// after the next promise.
    #[test]
    fn what_is_promised_is_kept_and_nothing_is_from_the_future(
        requests in requests(),
        place in any::<proptest::sample::Index>(),
        pick in pick(),
    ) {
        let source = record(&requests);
        let log = parse(&source).unwrap();
        let promises: Vec<usize> =
            (0..requests.len()).filter(|index| is_promise(&requests[*index])).collect();
        prop_assert_eq!(log.promise_count(), promises.len());
        let cut = Cut { after: place.index(promises.len() + 1), pick };
        let given = &promises[..cut.after];
        let flush = given.iter().rev().find(|index| matches!(requests[**index], Request::Flush));
        let flushed = flush.map_or(0, |index| index + 1);
        let next = promises.get(cut.after).copied().unwrap_or(requests.len());
        // A write with FUA may have been under way.
        let end = (next + 1).min(requests.len());
        let found = writers(&image(&log, &source, cut));
        let durable = after(&requests[..flushed]);
        for (sector, found) in (0..DISK_SECTORS).zip(&found) {
            let mut may_be = vec![durable[sector as usize]];
            for (index, request) in requests.iter().enumerate().take(end).skip(flushed) {
                let (range, value) = match *request {
                    Request::Write { sector, sectors, .. } => (sector..sector + sectors, index as u8 + 1),
                    Request::Discard { sector, sectors } => (sector..sector + sectors, 0),
                    Request::Flush => continue,
                };
                if range.contains(&sector) {
                    if given.contains(&index) {
                        may_be.clear();
                    }
                    may_be.push(value);
                }
            }
            prop_assert!(may_be.contains(found), "sector {}: {} of {:?}", sector, found, may_be);
        }
        if pick == Pick::All {
            prop_assert_eq!(found, after(&requests[..end]));
        }
    }

    /// Replaying forward from cut to cut leaves the same disks as beginning anew for each.
    #[test]
    fn a_name_stands_for_one_disk(requests in requests(), choices in 0..4usize) {
        let source = record(&requests);
        let log = parse(&source).unwrap();
        let mut replay = Replay::new(source.clone(), empty_disk());
        for cut in log.cuts(choices) {
            replay.cut(&log, cut).unwrap();
            prop_assert_eq!(replay.disk(), &image(&log, &source, cut), "{}", cut);
            prop_assert_eq!(cut.to_string().parse(), Ok(cut));
        }
    }

    /// A sweep has every promise, and none of its disks can be seen in the log to be that of another cut.
    #[test]
    fn a_sweep_has_each_promise_once(requests in requests(), choices in 0..4usize) {
        let source = record(&requests);
        let log = parse(&source).unwrap();
        let cuts = log.cuts(choices);
        let kept: HashSet<_> = cuts
            .iter()
            .map(|cut| (log.flushed(cut.after), log.kept(*cut).unwrap()))
            .collect();
        prop_assert_eq!(kept.len(), cuts.len());
        prop_assert!(cuts.is_sorted_by_key(|cut| cut.after));
        let images: HashSet<Vec<u8>> = cuts.iter().map(|cut| image(&log, &source, *cut).0).collect();
        for after in 0..=log.promise_count() {
            let left = image(&log, &source, Cut { after, pick: Pick::None });
            prop_assert!(images.contains(&left.0), "{}", after);
        }
        let last = image(&log, &source, Cut { after: log.promise_count(), pick: Pick::All });
        prop_assert!(images.contains(&last.0));
    }

    /// The log at an earlier moment is that of a machine that was recorded until then.
    #[test]
    fn a_log_at_a_moment_is_a_log(requests in requests(), moment in any::<proptest::sample::Index>()) {
        let moment = moment.index(requests.len() + 1);
        let source = record(&requests);
        let until = parse(&source).unwrap().until(moment);
        let earlier = parse(&record(&requests[..moment])).unwrap();
        prop_assert_eq!(&until, &earlier);
        let last = Cut { after: until.promise_count(), pick: Pick::All };
        prop_assert_eq!(writers(&image(&until, &source, last)), after(&requests[..moment]));
    }

    /// The recording was killed: the log is cut short anywhere, or has a gap.
    #[test]
    fn a_log_that_is_cut_short_ends_with_the_last_whole_entry(
        requests in requests(),
        length in any::<proptest::sample::Index>(),
    ) {
        let whole = record(&requests);
        let log = parse(&whole).unwrap();
        prop_assert_eq!(log.entries().len(), requests.len());
        prop_assert_eq!(log.missing(), 0);
        let length = length.index(whole.0.len() + 1);
        let short = parse(&Bytes(whole.0[..length].to_vec()));
        if length < 32 {
            let is_told = matches!(short, Err(LogError::NoSuperblock { .. }));
            prop_assert!(is_told);
            return Ok(());
        }
        let short = short.unwrap();
        let count = short.entries().len();
        prop_assert_eq!(short.entries(), &log.entries()[..count]);
        prop_assert_eq!(short.missing() as usize, requests.len() - count);
        prop_assert!(log.entries_before(length as u64) <= count + 1);

        let Some(entry) = log.entries().get(count) else { return Ok(()) };
        let mut gap = whole.clone();
        gap.0[entry.header_at as usize..][..SECTOR].fill(0);
        let gap = parse(&gap).unwrap();
        prop_assert_eq!(gap.entries(), short.entries());
    }

    #[test]
    fn arbitrary_bytes_are_a_log_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..4096), magic: bool) {
        if magic {
            let start = record(&[]).0;
            let length = start.len().min(bytes.len());
            bytes[..length].copy_from_slice(&start[..length]);
        }
        let _ = parse(&Bytes(bytes));
    }
}

#[test]
fn what_was_said_must_hold_from_the_next_promise_on() {
    let write = |sector| Request::Write {
        sector,
        sectors: 1,
        fua: false,
    };
    let source = record(&[write(0), Request::Flush, write(1), Request::Flush, write(2)]);
    let log = parse(&source).unwrap();
    let length_with = |entries: usize| log.entries().get(entries).map(|entry| entry.header_at);
    // The first flush was complete, and the guest has said so.
    let said = log.entries_before(length_with(2).unwrap());
    assert_eq!(said, 2);
    assert!(log.issued(0) < said && log.issued(1) >= said && log.issued(2) >= said);
    assert_eq!(log.issued(2), 5);
    assert_eq!(log.entries_before(u64::MAX), 5);
}

#[test]
fn writes_are_lost_torn_and_kept() {
    let write = Request::Write {
        sector: 2,
        sectors: 4,
        fua: false,
    };
    let source = record(&[write, Request::Flush]);
    let log = parse(&source).unwrap();
    let seeds = (0..200).map(|seed| Cut {
        after: 0,
        pick: Pick::Seed(seed),
    });
    let kept: HashSet<Vec<u8>> = seeds
        .map(|cut| writers(&image(&log, &source, cut))[2..6].to_vec())
        .collect();
    let first = (0..=4).map(|count| [vec![1; count], vec![0; 4 - count]].concat());
    let last = (0..=4).map(|count| [vec![0; count], vec![1; 4 - count]].concat());
    assert_eq!(kept, first.chain(last).collect());
    let names: Vec<String> = log.cuts(2).iter().map(Cut::to_string).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names[0] == "0" && names[3] == "1", "{names:?}");
}

#[test]
fn a_discard_leaves_zeros_or_nothing_happens() {
    let write = Request::Write {
        sector: 0,
        sectors: 2,
        fua: false,
    };
    let discard = Request::Discard {
        sector: 0,
        sectors: 2,
    };
    let source = record(&[write, Request::Flush, discard, Request::Flush]);
    let log = parse(&source).unwrap();
    let left = |name: &str| writers(&image(&log, &source, name.parse().unwrap()))[..2].to_vec();
    assert_eq!(left("1"), [1, 1]);
    assert_eq!(left("1+all"), [0, 0]);
    assert_eq!(left("2"), [0, 0]);
    assert_eq!(log.entries()[2].kind, Kind::Discard);
}

#[test]
fn what_contradicts_the_format_is_named_with_its_place() {
    let write = Request::Write {
        sector: 0,
        sectors: 1,
        fua: false,
    };
    let good = record(&[write, Request::Flush]);
    let with = |at: usize, value: u64| {
        let mut bytes = good.clone();
        bytes.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        parse(&bytes).unwrap_err().to_string()
    };
    let message = "superblock: magic: expected 0x6a736677736872, found 0x7";
    assert_eq!(with(0, 7), message);
    assert_eq!(with(8, 2), "superblock: version: expected 0x1, found 0x2");
    assert!(with(24, 500).starts_with("superblock: sector size: expected a power of two"));
    let entry = "entry 0 at byte 512: ";
    assert!(with(512 + 16, 16).starts_with(&format!("{entry}flags: expected one of")));
    assert!(with(512 + 16, 1).starts_with(&format!("{entry}flags: expected one of")));
    let message = "sector: expected an end within the disk's 24 sectors, found 0x18";
    assert_eq!(with(512, DISK_SECTORS), format!("{entry}{message}"));
    assert!(with(512 + 8, u64::MAX).starts_with(entry));
}

#[test]
fn names_of_cuts_are_strict() {
    for wrong in [
        "", "x", "-1", "+all", "1+", "1+none", "1+seed", "1+seed-2", "01", "1+seed07", "1+all ",
    ] {
        assert_eq!(wrong.parse::<Cut>(), Err(NotACut(wrong.to_owned())));
    }
}

#[test]
fn a_disk_is_replayed_forward_and_within_the_log() {
    let source = record(&[Request::Flush, Request::Flush]);
    let log = parse(&source).unwrap();
    let mut replay = Replay::new(source.clone(), empty_disk());
    let at = |after| Cut {
        after,
        pick: Pick::None,
    };
    replay.cut(&log, at(2)).unwrap();
    let is_told = matches!(replay.cut(&log, at(1)), Err(ReplayError::Before { .. }));
    assert!(is_told);
    let is_told = matches!(replay.cut(&log, at(3)), Err(ReplayError::NoSuchCut { .. }));
    assert!(is_told);
}
