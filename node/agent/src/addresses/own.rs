//! This node's own address record, whose counter never decreases.
//!
//! Of two records of one node, the one with the higher counter is the current one, for all nodes
//! and always. So the counter is on the data partition before a record with it is sent, and it is
//! only incremented when the address changes: a node that boots a thousand times with one address
//! has one record.
//!
//! A file that is lost or damaged cannot be restored here. But other nodes keep what this node has
//! signed; when it receives a record of its own with a higher counter, it continues above that.

use std::net::IpAddr;
use std::path::Path;

use hearth_api::private::StoredAddress;
use hearth_host::record::{self, Record as _, RecordError};

use crate::learned::AddressRecord;

/// The record for this address: the one on disk, if it has this address and its counter is above
/// `heard`; otherwise a new one, which is saved.
pub(crate) fn word(path: &Path, host: IpAddr, heard: u64) -> Result<AddressRecord, RecordError> {
    let last = load(path)?;
    if let Some(last) = last
        && last.host == host
        && last.counter > heard
    {
        return Ok(last);
    }
    let before = last.map_or(0, |last| last.counter).max(heard);
    let located = AddressRecord {
        host,
        counter: before.saturating_add(1),
    };
    let stored = StoredAddress {
        version: StoredAddress::VERSION,
        host: host.to_string(),
        counter: located.counter,
    };
    record::save(path, &stored)?;
    Ok(located)
}

fn load(path: &Path) -> Result<Option<AddressRecord>, RecordError> {
    record::load(path, |stored: StoredAddress| {
        let host = stored.host.parse();
        host.map(|host| AddressRecord {
            host,
            counter: stored.counter,
        })
    })
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn each_change_has_a_higher_counter_and_nothing_else_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("address.pb");
        let say = |last, heard| word(&path, ip(last), heard).unwrap().counter;
        assert_eq!(say(1, 0), 1);
        assert_eq!(say(1, 0), 1, "after any number of boots");
        assert_eq!(say(2, 0), 2);
        assert_eq!(say(1, 0), 3, "back again is a change");
        // Other nodes remember a higher counter than this node.
        assert_eq!(say(1, 9), 10);
        assert_eq!(say(1, 9), 10);
        assert_eq!(say(1, 0), 10);
    }

    #[test]
    fn a_damaged_file_is_made_good_by_those_who_remember() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("address.pb");
        std::fs::write(&path, b"\xff\xff").unwrap();
        assert_eq!(word(&path, ip(1), 0).unwrap().counter, 1);
        assert_eq!(word(&path, ip(1), 7).unwrap().counter, 8);
    }

    #[test]
    fn what_cannot_be_kept_is_not_said() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("missing").join("address.pb");
        assert!(word(&path, ip(1), 0).is_err());
    }

    #[test]
    fn the_stored_form_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("address.pb");
        let read = |stored: Vec<u8>, wanted: AddressRecord| {
            std::fs::write(&path, stored).unwrap();
            assert_eq!(load(&path).unwrap(), Some(wanted));
        };
        let located = word(&path, ip(7), 299).unwrap();
        assert_eq!(located.counter, 300);
        let written = std::fs::read(&path).unwrap();
        read(stored_form!("address.pb", written), located);
        let located = word(&path, "2001:db8::7".parse().unwrap(), 0).unwrap();
        assert_eq!(located.counter, 301);
        let written = std::fs::read(&path).unwrap();
        read(stored_form!("address-ipv6.pb", written), located);
    }
}
