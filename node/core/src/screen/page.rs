//! The page, from what is known. It fits into 80 columns and 25 lines.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use hearth_enrolment::machine::EnrolmentStatus;
use hearth_host::cluster_state::State;
use hearth_host::date;
use hearth_sys::screen::{Line, Size, Span};

use super::code;

/// No page is wider: lines of a large screen would be hard to read.
const WIDEST: usize = 80;
/// Between text and a code.
const GAP: usize = 3;
/// Where the text begins after the name of a row.
const INDENT: usize = 12;
/// The text beside a code is no narrower.
const NARROWEST: usize = 30;

/// What is known of the machine.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub version: String,
    pub uptime: Duration,
    pub now: SystemTime,
    pub state: State,
    pub node: Option<String>,
    pub cluster: Option<String>,
    pub address: Option<IpAddr>,
    pub second: Option<IpAddr>,
    pub status: Option<EnrolmentStatus>,
    pub problems: Vec<String>,
}

/// The lines of the page, for a screen of this size.
pub(super) fn lines(known: &Known, size: Size) -> Vec<Line> {
    let width = size.columns.min(WIDEST);
    let mut page: Vec<Line> = head(known, width).into_iter().map(plain).collect();
    page.push(Vec::new());
    let code = code(known, width, size.rows.saturating_sub(page.len()));
    let beside = code.as_ref().map_or(width, |code| {
        let taken = code.first().map_or(0, columns) + GAP;
        width - taken
    });
    let text = text(known, beside);
    let rows = text.len().max(code.as_ref().map_or(0, Vec::len));
    let mut text = text.into_iter();
    let mut code = code.into_iter().flatten();
    for _ in 0..rows {
        let mut line = plain(text.next().unwrap_or_default());
        if let Some(code) = code.next() {
            let blank = beside + GAP - columns(&line);
            line.push(Span::Plain(" ".repeat(blank)));
            line.extend(code);
        }
        page.push(line);
    }
    page
}

fn plain(text: String) -> Line {
    vec![Span::Plain(text)]
}

fn columns(line: &Line) -> usize {
    line.iter().map(|span| span.text().chars().count()).sum()
}

/// Who the machine is.
fn head(known: &Known, width: usize) -> Vec<String> {
    let title = format!(" Hearth {}", known.version);
    let uptime = format!("up {} ", duration(known.uptime));
    let gap = width.saturating_sub(title.chars().count() + uptime.chars().count());
    let addresses = [known.address, known.second].into_iter().flatten();
    let addresses: Vec<String> = addresses.map(|address| address.to_string()).collect();
    let address = match addresses.is_empty() {
        true => "none".to_owned(),
        false => addresses.join(", "),
    };
    let unknown = || "not a member of a cluster".to_owned();
    let time = date::date_and_time(known.now);
    let mut head = vec![title + &" ".repeat(gap) + &uptime, String::new()];
    let rows = [
        ("state", known.state.to_string()),
        ("node", known.node.clone().unwrap_or_else(unknown)),
        (
            "cluster",
            known.cluster.clone().unwrap_or_else(|| "-".to_owned()),
        ),
        ("address", address),
        // To the minute: the page is not drawn each second.
        (
            "time",
            format!("{} UTC", time.get(..16).unwrap_or(&time).replace('T', " ")),
        ),
    ];
    head.extend(rows.map(|(name, value)| format!(" {name:w$}{value}", w = INDENT - 1)));
    head
}

/// Days and hours, hours and minutes, or minutes.
fn duration(uptime: Duration) -> String {
    let minutes = uptime.as_secs() / 60;
    match (minutes / 60 / 24, minutes / 60 % 24, minutes % 60) {
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// The code of the key that has to be approved, if there is one and it fits.
fn code(known: &Known, width: usize, rows: usize) -> Option<Vec<Line>> {
    let Some(EnrolmentStatus::Waiting {
        unapproved: Some(key),
        ..
    }) = &known.status
    else {
        return None;
    };
    // Capital letters need fewer points.
    let text = key.to_string().to_uppercase();
    code::of(&text, width.checked_sub(GAP + NARROWEST)?, rows)
}

/// What the machine does, waits for, or refuses, and what is wrong.
fn text(known: &Known, width: usize) -> Vec<String> {
    let status = known.status.as_ref().and_then(|status| match status {
        EnrolmentStatus::Working(work) => Some(format!("Working: {work}")),
        EnrolmentStatus::Retrying { work, reason } => {
            Some(format!("Cannot {work}, and tries again: {reason}"))
        }
        EnrolmentStatus::Waiting { reason, .. } => Some(format!("Waiting for {reason}")),
        EnrolmentStatus::Refused(reason) => Some(format!("Refused: {reason}")),
        EnrolmentStatus::Settled => None,
    });
    let mut lines = Vec::new();
    for paragraph in status.iter().chain(&known.problems) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        let wrapped = wrap(paragraph, width.saturating_sub(2).max(1));
        lines.extend(wrapped.into_iter().map(|line| format!(" {line}")));
    }
    lines
}

/// Breaks text between words, and words that are longer than a line.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut used = 0;
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + word.len() <= width {
            line.push(' ');
            line.extend(&word);
            used += 1 + word.len();
            continue;
        }
        if used > 0 {
            lines.push(std::mem::take(&mut line));
        }
        while word.len() > width {
            lines.push(word.drain(..width).collect());
        }
        used = word.len();
        line = word.into_iter().collect();
    }
    if used > 0 {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::SigningKey;
    use proptest::prelude::*;

    use super::*;

    const SIZE: Size = Size {
        columns: 80,
        rows: 25,
    };

    fn known() -> Known {
        Known {
            version: "0.1.0".into(),
            uptime: Duration::from_secs(3 * 3600 + 12 * 60),
            now: SystemTime::UNIX_EPOCH + Duration::from_secs(1_796_000_000),
            state: State::Unknown,
            node: None,
            cluster: None,
            address: None,
            second: None,
            status: None,
            problems: Vec::new(),
        }
    }

    fn home() -> Known {
        Known {
            state: State::Home,
            node: Some("hearth-e301748a6f6408a2c65bb1b734f448a7".into()),
            cluster: Some("00112233445566778899aabbccddeeff".into()),
            address: "192.0.2.10".parse().ok(),
            second: "2001:db8::10".parse().ok(),
            status: Some(EnrolmentStatus::Settled),
            ..known()
        }
    }

    /// As it looks, without blanks at the ends of lines.
    fn shown(known: &Known) -> String {
        let lines = lines(known, SIZE);
        let text = |line: &Line| -> String { line.iter().map(Span::text).collect() };
        let lines = lines.iter().map(text);
        lines
            .map(|line| line.trim_end().to_owned() + "\n")
            .collect()
    }

    #[test]
    fn a_node_that_is_home_says_who_it_is() {
        assert_eq!(
            shown(&home()).lines().collect::<Vec<_>>(),
            [
                " Hearth 0.1.0                                                     up 3 h 12 min",
                "",
                " state      HOME",
                " node       hearth-e301748a6f6408a2c65bb1b734f448a7",
                " cluster    00112233445566778899aabbccddeeff",
                " address    192.0.2.10, 2001:db8::10",
                " time       2026-11-30 00:53 UTC",
                ""
            ]
        );
    }

    #[test]
    fn what_is_wrong_stands_below() {
        let page = Known {
            uptime: Duration::from_secs(59),
            status: Some(EnrolmentStatus::Retrying {
                work: "get an address".into(),
                reason:
                    "no Ethernet device is there, and none has been there since this machine was \
                         switched on"
                        .into(),
            }),
            problems: vec!["Network: eth1: it is gone".into()],
            ..known()
        };
        assert_eq!(
            shown(&page).lines().collect::<Vec<_>>(),
            [
                " Hearth 0.1.0                                                          up 0 min",
                "",
                " state      UNKNOWN",
                " node       not a member of a cluster",
                " cluster    -",
                " address    none",
                " time       2026-11-30 00:53 UTC",
                "",
                " Cannot get an address, and tries again: no Ethernet device is there, and none",
                " has been there since this machine was switched on",
                "",
                " Network: eth1: it is gone"
            ]
        );
    }

    #[test]
    fn a_key_to_approve_is_a_code_beside_the_text() {
        let key = SigningKey::from_seed([7; 32]).public();
        let page = Known {
            state: State::Foreign,
            status: Some(EnrolmentStatus::Waiting {
                reason: format!(
                    "approval by an operator of cluster 00112233445566778899aabbccddeeff. The public key of this \
                     node is {key}. Compare it, then run: hearthctl node approve {key}"
                ),
                unapproved: Some(key),
            }),
            ..known()
        };
        let lines = lines(&page, SIZE);
        assert_eq!(lines.len(), 25);
        let code = lines
            .iter()
            .filter(|line| matches!(line.last(), Some(Span::Reversed(_))));
        assert_eq!(code.clone().count(), 17);
        for line in code {
            assert_eq!(columns(line), 80);
        }
        let text = shown(&page);
        assert!(
            text.contains(" Waiting for approval by an operator of"),
            "{text}"
        );
        // On a narrow screen there is the text alone.
        let narrow = super::lines(
            &page,
            Size {
                columns: 60,
                ..SIZE
            },
        );
        assert!(
            narrow
                .iter()
                .flatten()
                .all(|span| matches!(span, Span::Plain(_)))
        );
    }

    proptest! {
        #[test]
        fn nothing_is_wider_than_the_screen_and_no_word_is_lost(
            text in "[a-z ]{0,200}",
            columns in 20..100_usize,
        ) {
            let page = Known { problems: vec![text.clone()], ..home() };
            let size = Size { columns, rows: 25 };
            for line in &lines(&page, size)[8..] {
                prop_assert!(super::columns(line) <= columns);
            }
            let wrapped = wrap(&text, columns);
            let joined: String = wrapped.concat();
            prop_assert_eq!(joined.replace(' ', ""), text.replace(' ', ""));
        }
    }
}
