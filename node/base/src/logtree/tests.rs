//! The log tree: addresses, bounds, filters, readers, console.

use std::io::{self, Write};
use std::panic::AssertUnwindSafe;
use std::sync::mpsc;
use std::task;
use std::time::Instant;

use proptest::prelude::*;
use tracing_subscriber::layer::SubscriberExt;

use super::*;

/// A clock that advances by a second with each entry.
fn options() -> Options {
    let ticks = Mutex::new(0);
    Options {
        clock: Arc::new(move || {
            let mut ticks = ticks.lock().expect("whole");
            *ticks += 1;
            let since_boot = Duration::from_secs(*ticks);
            (SystemTime::UNIX_EPOCH + since_boot, since_boot)
        }),
        ..Options::default()
    }
}

fn log_tree() -> LogTree {
    LogTree::new(options())
}

fn texts(entries: &[Entry]) -> Vec<String> {
    entries
        .iter()
        .map(|e| format!("{} {}", e.dn, e.message))
        .collect()
}

fn backlog(log_tree: &LogTree, query: Query) -> Vec<String> {
    texts(&log_tree.read(query).backlog)
}

fn drain(stream: &mut LogStream) -> Vec<String> {
    std::iter::from_fn(|| stream.try_next())
        .map(|item| match item {
            Item::Entry(entry) => entry.message.to_string(),
            Item::Missed(count) => format!("missed {count}"),
        })
        .collect()
}

fn with_layer(log_tree: &LogTree, run: impl FnOnce()) {
    let subscriber = tracing_subscriber::registry().with(log_tree.layer());
    tracing::subscriber::with_default(subscriber, run);
}

#[test]
fn names_contain_what_is_below_them() {
    for (name, ancestor, within) in [
        ("root.a", "root.a", true),
        ("root.a.b", "root.a", true),
        ("root.ab", "root.a", false),
        ("root", "root.a", false),
        ("init", "root", false),
        ("init", "", true),
        ("", "", true),
    ] {
        assert_eq!(is_within(name, ancestor), within, "{name} in {ancestor}");
    }
}

#[test]
fn events_are_addressed_by_field_span_or_the_outside() {
    let log_tree = log_tree();
    with_layer(&log_tree, || {
        tracing::info!("early");
        let runnable = tracing::error_span!("runnable", dn = "root.a");
        runnable.in_scope(|| {
            tracing::info!("in the runnable");
            tracing::info_span!("step").in_scope(|| tracing::info!("deeper"));
            tracing::info!(dn = "root.a.etcd", "a line of the child");
            tracing::info!(dn = %"root.a.etcd", "displayed");
            tracing::info_span!("other", dn = %"root.b").in_scope(|| tracing::info!("nearest"));
            let late = tracing::info_span!("late", dn = tracing::field::Empty);
            late.record("dn", "root.c");
            late.in_scope(|| tracing::info!("recorded"));
        });
        tracing::info!(dn = "", "nameless");
    });
    let expected = [
        "init early",
        "root.a in the runnable",
        "root.a deeper",
        "root.a.etcd a line of the child",
        "root.a.etcd displayed",
        "root.b nearest",
        "root.c recorded",
        "init nameless",
    ];
    assert_eq!(backlog(&log_tree, Query::subtree("")), expected);
}

#[test]
fn fields_follow_the_message() {
    let log_tree = log_tree();
    with_layer(&log_tree, || {
        let error = io::Error::other("no space left");
        let error: &(dyn std::error::Error + 'static) = &error;
        tracing::warn!(
            port = 7835,
            up = true,
            name = "eth0",
            peer = "a b",
            error,
            "link"
        );
        tracing::error!(list = ?[1, 2], shown = %"plain text");
        tracing::info!(empty = "", "none");
    });
    let expected = [
        "init link port=7835 up=true name=eth0 peer=\"a b\" error=\"no space left\"",
        "init list=[1, 2] shown=plain text",
        "init none empty=\"\"",
    ];
    assert_eq!(backlog(&log_tree, Query::subtree("")), expected);
    let first = &log_tree.read(Query::exact("init")).backlog[0];
    let (file, _) = first.place.expect("it has a place");
    assert!(file.ends_with("logtree/tests.rs"), "{file}");
}

#[test]
fn what_is_not_kept_is_not_stored() {
    let log_tree = LogTree::new(Options {
        keep: Severity::Warning,
        ..options()
    });
    // Next to a more verbose layer, which makes the event be created.
    let talkative = LogTree::new(Options {
        keep: Severity::Trace,
        ..options()
    });
    let subscriber = tracing_subscriber::registry()
        .with(talkative.layer())
        .with(log_tree.layer());
    tracing::subscriber::with_default(subscriber, || {
        tracing::info!("chatter");
        tracing::warn!("kept");
    });
    assert_eq!(talkative.read(Query::subtree("")).backlog.len(), 2);
    log_tree.append_raw("root", Severity::Info, "chatter");
    log_tree.append_raw("root", Severity::Error, "kept");
    assert_eq!(
        backlog(&log_tree, Query::subtree("")),
        ["init kept", "root kept"]
    );
}

fn some_entries() -> LogTree {
    let log_tree = log_tree();
    for (dn, severity, text) in [
        ("root.a", Severity::Info, "1"),
        ("root.a.x", Severity::Error, "2"),
        ("root.ab", Severity::Warning, "3"),
        ("root.a", Severity::Warning, "4"),
        ("root.a.x", Severity::Info, "5"),
        ("init", Severity::Error, "6"),
    ] {
        log_tree.append_raw(dn, severity, text);
    }
    log_tree
}

#[test]
fn queries_choose_name_subtree_severity_and_number() {
    let log_tree = some_entries();
    let all = Query::subtree("root.a");
    let grave = Query {
        min_severity: Severity::Warning,
        ..all.clone()
    };
    let count = |count, query: &Query| Query {
        backlog: Backlog::Count(count),
        ..query.clone()
    };
    for (query, expected) in [
        (Query::exact("root.a"), vec!["root.a 1", "root.a 4"]),
        (
            all.clone(),
            vec!["root.a 1", "root.a.x 2", "root.a 4", "root.a.x 5"],
        ),
        (grave.clone(), vec!["root.a.x 2", "root.a 4"]),
        (count(2, &all), vec!["root.a 4", "root.a.x 5"]),
        (count(1, &grave), vec!["root.a 4"]),
        (count(1, &Query::exact("root.a")), vec!["root.a 4"]),
        (count(0, &all), vec![]),
        (Query::subtree("nobody"), vec![]),
        (Query::exact(""), vec![]),
    ] {
        assert_eq!(backlog(&log_tree, query.clone()), expected, "{query:?}");
    }
    let none = Query {
        backlog: Backlog::None,
        ..all
    };
    let reader = log_tree.read(none);
    assert!(reader.backlog.is_empty() && reader.stream.is_none());
}

#[test]
fn streams_filter_as_backlogs_do() {
    let log_tree = log_tree();
    let follow = |query: Query| Query {
        follow: true,
        ..query
    };
    let open = |query: Query| log_tree.read(follow(query)).stream.expect("it follows");
    let mut exact = open(Query::exact("root.a"));
    let mut subtree = open(Query::subtree("root.a"));
    let mut grave = open(Query {
        min_severity: Severity::Warning,
        ..Query::subtree("")
    });
    for (dn, severity, text) in [
        ("root.a", Severity::Info, "1"),
        ("root.a.x", Severity::Error, "2"),
        ("root.ab", Severity::Warning, "3"),
    ] {
        log_tree.append_raw(dn, severity, text);
    }
    assert_eq!(drain(&mut exact), ["1"]);
    assert_eq!(drain(&mut subtree), ["1", "2"]);
    assert_eq!(drain(&mut grave), ["2", "3"]);
}

#[test]
fn the_slow_reader_is_told_what_it_missed_and_where() {
    let log_tree = LogTree::new(Options {
        stream_entries: 2,
        ..options()
    });
    let query = Query {
        follow: true,
        ..Query::exact("root")
    };
    let mut slow = log_tree.read(query.clone()).stream.expect("it follows");
    let mut fast = log_tree.read(query).stream.expect("it follows");
    let mut seen = Vec::new();
    for number in 0..5 {
        log_tree.append_raw("root", Severity::Info, &number.to_string());
        log_tree.append_raw("elsewhere", Severity::Info, "is not missed");
        seen.extend(drain(&mut fast));
    }
    assert_eq!(seen, ["0", "1", "2", "3", "4"]);
    assert_eq!(drain(&mut slow), ["0", "1", "missed 3"]);
    log_tree.append_raw("root", Severity::Info, "5");
    assert_eq!(drain(&mut slow), ["5"]);
}

#[test]
fn a_readers_queue_is_bounded_in_bytes() {
    let log_tree = LogTree::new(Options {
        stream_bytes: 4000,
        ..options()
    });
    let query = Query {
        follow: true,
        ..Query::exact("root")
    };
    let mut stream = log_tree.read(query).stream.expect("it follows");
    let long = "x".repeat(10_000);
    log_tree.append_raw("root", Severity::Info, &long);
    log_tree.append_raw("root", Severity::Info, "short");
    let items = drain(&mut stream);
    assert_eq!(items, [long.as_str(), "missed 1"], "one entry always fits");
    for text in ["what is", "read makes", "room again"] {
        log_tree.append_raw("root", Severity::Info, text);
    }
    assert_eq!(drain(&mut stream), ["what is", "read makes", "room again"]);
}

#[test]
fn streams_wake_end_and_leave() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_time()
        .build();
    let runtime = runtime.expect("a runtime");
    let log_tree = log_tree();
    let query = Query {
        follow: true,
        ..Query::exact("root")
    };
    let mut stream = log_tree.read(query.clone()).stream.expect("it follows");
    let reading = runtime.spawn(async move {
        let mut items = Vec::new();
        while let Some(item) = stream.next().await {
            items.push(item);
        }
        items.len()
    });
    let left = log_tree.read(query).stream;
    assert_eq!(log_tree.journal().followers.len(), 2);
    drop(left);
    for _ in 0..100 {
        log_tree.append_raw("root", Severity::Info, "line");
    }
    assert_eq!(log_tree.journal().followers.len(), 1);
    drop(log_tree);
    let count = runtime.block_on(async {
        let bounded = tokio::time::timeout(Duration::from_secs(20), reading);
        bounded.await.expect("the stream ends").expect("no panic")
    });
    assert_eq!(count, 100);
}

/// Readers that arrive while others write: backlog and stream together have each entry once and in
/// order.
#[test]
fn nothing_is_lost_between_backlog_and_stream() {
    const WRITERS: usize = 3;
    const EACH: usize = 300;
    let log_tree = log_tree();
    std::thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                for number in 0..EACH {
                    log_tree.append_raw("root", Severity::Info, &number.to_string());
                }
            });
        }
        for _ in 0..3 {
            scope.spawn(|| {
                let reader = log_tree.read(Query {
                    follow: true,
                    ..Query::exact("root")
                });
                let mut stream = reader.stream.expect("it follows");
                let mut seen: Vec<u64> = reader.backlog.iter().map(|e| e.sequence).collect();
                let until = Instant::now() + Duration::from_secs(20);
                while seen.len() < WRITERS * EACH {
                    match stream.try_next() {
                        Some(Item::Entry(entry)) => seen.push(entry.sequence),
                        Some(Item::Missed(count)) => panic!("missed {count}"),
                        None => std::thread::yield_now(),
                    }
                    assert!(Instant::now() < until, "only {} came", seen.len());
                }
                let expected: Vec<u64> = (0..(WRITERS * EACH) as u64).collect();
                assert_eq!(seen, expected);
            });
        }
    });
}

#[test]
fn messages_of_several_lines_are_one_entry_and_long_ones_are_cut() {
    let log_tree = LogTree::new(Options {
        max_message: 10,
        ..options()
    });
    log_tree.append_raw("root", Severity::Info, "a\nb\r\n");
    log_tree.append_raw("root", Severity::Info, "123456789€ and more");
    let entries = log_tree.read(Query::exact("root")).backlog;
    assert_eq!(entries[0].lines().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(&*entries[1].message, "123456789… (12 bytes more)");
    log_tree.append_raw(&"n".repeat(2000), Severity::Info, "cut name");
    let longest = log_tree.read(Query::subtree("n".repeat(512))).backlog;
    assert_eq!(longest.len(), 1);
}

#[test]
fn concise_lines_fit_a_console() {
    let entry = Entry {
        dn: "root.network".into(),
        severity: Severity::Info,
        at: SystemTime::UNIX_EPOCH,
        monotonic: Duration::from_millis(2345),
        place: None,
        message: "link eth0\tis \u{1b}[31mup\nand has an address".into(),
        sequence: 0,
    };
    let expected = "[   2.345] I root.network  link eth0 is \u{fffd}[31mup\n\
                    [   2.345] |               and has an address";
    assert_eq!(entry.concise(0), expected);
    assert_eq!(entry.to_string(), expected);
    let narrow = entry.concise(40);
    assert!(
        narrow.lines().all(|line| line.chars().count() <= 40),
        "{narrow}"
    );
    assert!(
        narrow
            .lines()
            .next()
            .is_some_and(|line| line.ends_with('…'))
    );
    for width in 1..60 {
        let fits = |line: &str| line.chars().count() <= width;
        assert!(entry.concise(width).lines().all(fits));
    }
    let deep = Entry {
        dn: "root.role.controlplane.launcher.consensus.etcd".into(),
        message: "ready".into(),
        ..entry.clone()
    };
    assert_eq!(
        deep.concise(80),
        "[   2.345] I …launcher.consensus.etcd  ready"
    );
    let name = "x".repeat(40);
    let long = Entry {
        dn: name.as_str().into(),
        ..entry
    };
    assert!(long.concise(0).contains(&format!(" …{}  ", "x".repeat(27))));
}

/// A console whose writer accepts an entry only when it is allowed to.
struct Gate {
    allow: mpsc::Receiver<()>,
    out: mpsc::Sender<String>,
}

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // When the gate's sender is dropped, everything else passes.
        let _ = self.allow.recv();
        let text = String::from_utf8_lossy(bytes).trim_end().to_owned();
        let _ = self.out.send(text);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_stuck_console_holds_nobody_up() {
    let log_tree = LogTree::new(Options {
        stream_entries: 2,
        ..options()
    });
    let (allow, allowed) = mpsc::channel();
    let (out, printed) = mpsc::channel();
    let gate = Gate {
        allow: allowed,
        out,
    };
    log_tree.append_raw("init", Severity::Info, "before");
    log_tree.append_raw("init", Severity::Debug, "not kept");
    let console = console(&log_tree, gate, |_| true, 80).expect("a thread");
    assert!(
        !console.flush(Duration::from_millis(1)),
        "the backlog waits"
    );
    allow.send(()).expect("it is there");
    let line = printed
        .recv_timeout(Duration::from_secs(20))
        .expect("printed");
    assert_eq!(line, "[   1.000] I init  before");
    assert!(console.flush(Duration::from_secs(20)));
    // The writer is blocked now; logging does not notice.
    for number in 0..100 {
        log_tree.append_raw("root", Severity::Info, &number.to_string());
    }
    assert!(!console.flush(Duration::from_millis(1)));
    drop(allow);
    assert!(console.flush(Duration::from_secs(20)));
    drop(console);
    let mut lines: Vec<String> = Vec::new();
    loop {
        match printed.recv_timeout(Duration::from_secs(20)) {
            Ok(line) => lines.push(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the thread does not end"),
        }
    }
    let missed: u64 = lines
        .iter()
        .filter_map(|line| {
            let count = line
                .strip_prefix("... ")?
                .strip_suffix(" log entries not shown here")?;
            count.parse::<u64>().ok()
        })
        .sum();
    let shown = lines.iter().filter(|line| line.contains("I root")).count() as u64;
    assert_eq!(missed + shown, 100, "{lines:?}");
    assert!(missed > 90, "{lines:?}");
}

#[test]
fn the_console_survives_a_broken_line() {
    struct Broken;
    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::other("unplugged"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::Error::other("unplugged"))
        }
    }
    let log_tree = log_tree();
    let console = console(&log_tree, Broken, |_| true, 0).expect("a thread");
    for _ in 0..10 {
        log_tree.append_raw("root", Severity::Info, "line");
    }
    assert!(console.flush(Duration::from_secs(20)));
}

#[test]
fn panics_are_logged_where_they_happen() {
    log_panics();
    let log_tree = log_tree();
    with_layer(&log_tree, || {
        let span = tracing::error_span!("runnable", dn = "root.a");
        let result =
            std::panic::catch_unwind(AssertUnwindSafe(|| span.in_scope(|| panic!("dropped it"))));
        assert!(result.is_err());
    });
    let entries = log_tree.read(Query::exact("root.a")).backlog;
    assert!(entries[0].message.contains("dropped it"), "{entries:?}");
    assert!(
        entries[0].message.contains("logtree/tests.rs"),
        "{entries:?}"
    );
}

/// A value whose formatting logs itself must not lock up the journal.
#[test]
fn logging_while_logging() {
    struct Chatty;
    impl fmt::Display for Chatty {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            tracing::info!("inner");
            f.write_str("outer")
        }
    }
    let log_tree = log_tree();
    with_layer(&log_tree, || tracing::info!("{Chatty}"));
    let entries = log_tree.read(Query::subtree("")).backlog;
    assert_eq!(
        entries.last().map(|e| e.message.to_string()),
        Some("outer".into())
    );
}

#[derive(Debug, Clone)]
enum Step {
    Append {
        dn: usize,
        severity: u8,
        length: usize,
    },
    /// Opens a reader: name, subtree, minimum severity.
    Follow {
        dn: usize,
        subtree: bool,
        severity: u8,
    },
    Drain(usize),
}

const NAMES: [&str; 5] = ["", "root", "root.a", "root.a.x", "root.ab"];
const SEVERITIES: [Severity; 3] = [Severity::Info, Severity::Warning, Severity::Error];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1..5_usize, 0..3_u8, 0..300_usize)
            .prop_map(|(dn, severity, length)| Step::Append { dn, severity, length }),
        1 => (0..5_usize, any::<bool>(), 0..3_u8)
            .prop_map(|(dn, subtree, severity)| Step::Follow { dn, subtree, severity }),
        1 => any::<usize>().prop_map(Step::Drain),
    ]
}

/// A reader of the model: its filter, its stream, and the entries it has seen (`None`: one that it
/// was told it missed).
struct Follower {
    query: Query,
    stream: LogStream,
    wanted: Vec<u64>,
    got: Vec<Option<u64>>,
}

impl Follower {
    fn drain(&mut self) {
        while let Some(item) = self.stream.try_next() {
            match item {
                Item::Entry(entry) => self.got.push(Some(entry.sequence)),
                Item::Missed(count) => self.got.extend((0..count).map(|_| None)),
            }
        }
    }
}

fn wants(query: &Query, entry: &Entry) -> bool {
    let inside = entry.dn.starts_with(&format!("{}.", query.dn)) || query.dn.is_empty();
    let named = *entry.dn == *query.dn || (query.subtree && inside);
    named && entry.severity >= query.min_severity
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compared with a plain list of all entries ever logged: the limits hold, the stored entries
    /// are the newest ones, and every reader gets or misses each entry that it asked for, exactly
    /// once and in order.
    #[test]
    fn any_use_keeps_bounds_and_promises(steps in prop::collection::vec(step(), 0..150)) {
        let options = Options {
            max_entries: 40,
            max_bytes: 12_000,
            max_entries_per_dn: 20,
            max_bytes_per_dn: 6_000,
            stream_entries: 8,
            stream_bytes: 2_500,
            ..options()
        };
        let log_tree = LogTree::new(options.clone());
        let mut all: Vec<Entry> = Vec::new();
        let mut followers: Vec<Follower> = Vec::new();
        for step in steps {
            match step {
                Step::Append { dn, severity, length } => {
                    let severity = SEVERITIES[usize::from(severity)];
                    log_tree.append_raw(NAMES[dn], severity, &"x".repeat(length));
                    let newest = Query { backlog: Backlog::Count(1), ..Query::subtree("") };
                    let entry = log_tree.read(newest).backlog.remove(0);
                    prop_assert_eq!((&*entry.dn, entry.severity), (NAMES[dn], severity));
                    for follower in &mut followers {
                        if wants(&follower.query, &entry) {
                            follower.wanted.push(entry.sequence);
                        }
                    }
                    all.push(entry);
                }
                Step::Follow { dn, subtree, severity } => {
                    let min_severity = SEVERITIES[usize::from(severity)];
                    let exact = Query::exact(NAMES[dn]);
                    let query = Query { subtree, min_severity, follow: true, ..exact };
                    let reader = log_tree.read(query.clone());
                    let wanted: Vec<&Entry> = all.iter().filter(|e| wants(&query, e)).collect();
                    prop_assert!(reader.backlog.iter().all(|entry| wants(&query, entry)));
                    prop_assert!(reader.backlog.len() <= wanted.len());
                    let stream = reader.stream.expect("it follows");
                    followers.push(Follower { query, stream, wanted: vec![], got: vec![] });
                }
                Step::Drain(which) => {
                    let count = followers.len().max(1);
                    if let Some(follower) = followers.get_mut(which % count) {
                        follower.drain();
                    }
                }
            }
            let journal = log_tree.journal();
            prop_assert!(journal.bytes() <= options.max_bytes);
            for name in &NAMES[1..] {
                prop_assert!(journal.count_of(name) <= options.max_entries_per_dn);
            }
        }
        for name in &NAMES[1..] {
            let stored = log_tree.read(Query::exact(*name)).backlog;
            let own: Vec<Entry> = all.iter().filter(|e| *e.dn == **name).cloned().collect();
            prop_assert!(own.ends_with(&stored), "the newest of {} are stored", name);
            let bytes: usize = stored.iter().map(Entry::weight).sum();
            prop_assert!(bytes <= options.max_bytes_per_dn);
        }
        let stored = log_tree.read(Query::subtree("")).backlog;
        prop_assert!(stored.is_sorted_by_key(|entry| entry.sequence));
        prop_assert!(stored.len() <= options.max_entries);
        let bytes: usize = stored.iter().map(Entry::weight).sum();
        prop_assert_eq!(bytes, log_tree.journal().bytes());
        for mut follower in followers {
            follower.drain();
            prop_assert_eq!(follower.got.len(), follower.wanted.len());
            for (got, wanted) in follower.got.iter().zip(&follower.wanted) {
                prop_assert!(got.is_none_or(|got| got == *wanted));
            }
        }
    }
}

#[test]
fn polling_leaves_a_waker_that_the_next_entry_uses() {
    let log_tree = log_tree();
    let query = Query {
        follow: true,
        ..Query::exact("root")
    };
    let mut stream = log_tree.read(query).stream.expect("it follows");
    struct Flag(Mutex<bool>);
    impl task::Wake for Flag {
        fn wake(self: Arc<Self>) {
            *self.0.lock().expect("whole") = true;
        }
    }
    let flag = Arc::new(Flag(Mutex::new(false)));
    let waker = task::Waker::from(flag.clone());
    let mut context = task::Context::from_waker(&waker);
    assert!(stream.poll(&mut context).is_pending());
    log_tree.append_raw("elsewhere", Severity::Info, "no business of it");
    assert!(!*flag.0.lock().expect("whole"));
    log_tree.append_raw("root", Severity::Info, "line");
    assert!(*flag.0.lock().expect("whole"));
}
