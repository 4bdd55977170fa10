//! The owner's way to the keys of a node by its console.
//!
//! Who is at the console of a machine has the machine, so the recovery key is enough, and no network is needed. The node
//! shows a challenge, a line of text; `hearthctl owner answer` opens it with the recovery key and prints the answer,
//! another line, which is entered at the console. The recovery key itself never leaves the owner's machine.
//!
//! A node whose TPM does not open its sealed configuration can only be helped in this way: it has no key with which it
//! could sign a challenge, so over a network its owner could not know to whom the answer goes.
//!
//!
//! # Invariants
//! - An answer is encrypted for one challenge, whose private half is in the memory of one node: at
//!   another node, and after a restart, it does not open.
//! - An answer for a console is not one for a network, nor the other way round.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use prost::Message as _;
use zeroize::Zeroizing;

use super::{
    Challenge, Challenger, RecoveryError, RecoveryKey, RecoveryRecipient, WRAPPED_LEN, WrappedKey,
    field, open, open_key, seal,
};
use crate::identity::ClusterUnlockKey;
use crate::v1::console_challenge::Challenge as Message;
use crate::v1::{ConsoleChallenge as ConsoleMessage, RecordChallenge as RecordMessage};

const RECORD: &[u8] = b"hearth record v1\0";
const ANSWER: &[u8] = b"hearth console answer v1\0";

/// What a challenge begins with.
pub const BEGIN: &str = "hearth-challenge:";
/// What a challenge ends with: terminals break long lines.
pub const END: char = ';';

/// The key of a record that a TPM has sealed, wrapped to a recovery key as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrappedRecordKey {
    /// SHA-256 of what the TPM has sealed.
    pub record: [u8; 32],
    /// The wrapped key.
    pub wrapped_key: WrappedKey,
}

impl WrappedRecordKey {
    /// Wraps the key of this record.
    pub fn new(recipient: &RecoveryRecipient, record: [u8; 32], key: &[u8; 32]) -> Self {
        let wrapped_key = seal(recipient, &record_info(&record), key)
            .expect("the recipient was checked when it was parsed");
        Self {
            record,
            wrapped_key,
        }
    }
}

fn record_info(record: &[u8; 32]) -> Vec<u8> {
    [RECORD, record].concat()
}

/// The challenge of a node that cannot open its sealed configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordChallenge {
    key: WrappedRecordKey,
    answer_recipient: RecoveryRecipient,
}

impl RecordChallenge {
    fn parse(message: &RecordMessage) -> Result<Self, RecoveryError> {
        let found = format!("{} bytes", message.record.len());
        let record = <[u8; 32]>::try_from(&message.record[..])
            .map_err(|_| field("record", "32 bytes", found))?;
        Ok(Self {
            key: WrappedRecordKey {
                record,
                wrapped_key: WrappedKey::try_from(&message.wrapped_key[..])?,
            },
            answer_recipient: RecoveryRecipient::try_from(&message.answer_recipient[..])?,
        })
    }

    fn to_message(&self) -> RecordMessage {
        RecordMessage {
            record: self.key.record.to_vec(),
            wrapped_key: self.key.wrapped_key.0.to_vec(),
            answer_recipient: self.answer_recipient.0.to_vec(),
        }
    }
}

/// A challenge on a console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsoleChallenge {
    /// Of a node that waits for its cluster unlock key.
    UnlockKey(Challenge),
    /// Of a node whose TPM does not open its sealed configuration.
    Record(RecordChallenge),
}

impl ConsoleChallenge {
    /// The first challenge in this text, which may be broken into lines, and have other text before and after it.
    ///
    /// # Errors
    /// If there is none, or it is malformed, or its signature is invalid.
    pub fn parse(text: &str) -> Result<Self, RecoveryError> {
        const EXPECTED: &str = "the text from \"hearth-challenge:\" to \";\" on the node's console";
        let malformed = |found: &str| field("challenge", EXPECTED, found);
        let (_, begun) = text
            .split_once(BEGIN)
            .ok_or_else(|| malformed("no \"hearth-challenge:\""))?;
        let (encoded, _) = begun
            .split_once(END)
            .ok_or_else(|| malformed("no \";\" after it"))?;
        let encoded: String = encoded.split_whitespace().collect();
        let bytes = BASE64
            .decode(encoded)
            .map_err(|error| malformed(&format!("text that is not Base64 ({error})")))?;
        let message = ConsoleMessage::decode(&bytes[..])
            .map_err(|error| malformed(&format!("another message ({error})")))?;
        match message.challenge {
            Some(Message::UnlockKey(message)) => Ok(Self::UnlockKey(Challenge::parse(&message)?)),
            Some(Message::Record(message)) => Ok(Self::Record(RecordChallenge::parse(&message)?)),
            None => Err(malformed("a challenge of another version")),
        }
    }

    /// The challenge as a line of text.
    pub fn to_text(&self) -> String {
        let challenge = match self {
            Self::UnlockKey(challenge) => Message::UnlockKey(challenge.to_message()),
            Self::Record(challenge) => Message::Record(challenge.to_message()),
        };
        let message = ConsoleMessage {
            challenge: Some(challenge),
        };
        format!("{BEGIN}{}{END}", BASE64.encode(message.encode_to_vec()))
    }

    /// The answer, as a line of text.
    ///
    /// # Errors
    /// If the key in the challenge does not open with the recovery key.
    pub fn answered(&self, recovery: &RecoveryKey) -> Result<String, RecoveryError> {
        let answer = match self {
            Self::UnlockKey(challenge) => {
                let key = recovery.open(&challenge.node, &challenge.wrapped_key)?;
                seal(
                    &challenge.answer_recipient,
                    &self.answer_info(),
                    key.expose(),
                )?
            }
            Self::Record(challenge) => {
                let info = record_info(&challenge.key.record);
                let key = open(&recovery.private(), &info, &challenge.key.wrapped_key)?;
                seal(&challenge.answer_recipient, &self.answer_info(), &key)?
            }
        };
        Ok(BASE64.encode(answer.0))
    }

    fn answer_info(&self) -> Vec<u8> {
        match self {
            Self::UnlockKey(challenge) => [ANSWER, &challenge.signature].concat(),
            Self::Record(challenge) => [
                ANSWER,
                &challenge.key.record,
                &challenge.key.wrapped_key.0,
                &challenge.answer_recipient.0,
            ]
            .concat(),
        }
    }
}

/// What has been entered at the console.
fn entered(text: &str) -> Result<WrappedKey, RecoveryError> {
    let malformed = |found| {
        field(
            "answer",
            "the line that `hearthctl owner answer` prints",
            found,
        )
    };
    let text: String = text.split_whitespace().collect();
    let bytes = BASE64
        .decode(&text)
        .map_err(|error| malformed(format!("text that is not Base64 ({error})")))?;
    match bytes.len() {
        WRAPPED_LEN => WrappedKey::try_from(&bytes[..]),
        other => Err(malformed(format!("{other} bytes instead of {WRAPPED_LEN}"))),
    }
}

/// An answer that does not open.
fn not_ours(_: RecoveryError) -> RecoveryError {
    RecoveryError::ConsoleAnswer
}

impl Challenger {
    /// What the node shows on its console.
    pub fn console_challenge(&self) -> ConsoleChallenge {
        ConsoleChallenge::UnlockKey(self.challenge.clone())
    }

    /// The cluster unlock key in an answer that was entered at the console.
    ///
    /// # Errors
    /// If the text is not an answer, or is one to another challenge.
    pub fn accept_at_console(&self, text: &str) -> Result<ClusterUnlockKey, RecoveryError> {
        let info = self.console_challenge().answer_info();
        open_key(&self.answer_key.private(), &info, &entered(text)?).map_err(not_ours)
    }
}

/// The private half of a [`RecordChallenge`].
pub struct RecordChallenger {
    challenge: RecordChallenge,
    answer_key: RecoveryKey,
}

impl RecordChallenger {
    /// A new challenge for the key of this record.
    pub fn new(key: WrappedRecordKey) -> Self {
        let answer_key = RecoveryKey::generate();
        Self {
            challenge: RecordChallenge {
                key,
                answer_recipient: answer_key.recipient(),
            },
            answer_key,
        }
    }

    /// What the node shows on its console.
    pub fn console_challenge(&self) -> ConsoleChallenge {
        ConsoleChallenge::Record(self.challenge.clone())
    }

    /// The key of the record in an answer that was entered at the console.
    ///
    /// # Errors
    /// If the text is not an answer, or is one to another challenge.
    pub fn accept_at_console(&self, text: &str) -> Result<Zeroizing<[u8; 32]>, RecoveryError> {
        let info = self.console_challenge().answer_info();
        open(&self.answer_key.private(), &info, &entered(text)?).map_err(not_ours)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::World;
    use super::*;

    fn record(world: &World) -> (RecordChallenger, [u8; 32]) {
        let key = [9; 32];
        let wrapped = WrappedRecordKey::new(&world.recovery.recipient(), [4; 32], &key);
        (RecordChallenger::new(wrapped), key)
    }

    /// As a terminal of 80 columns shows it.
    fn broken(text: &str) -> String {
        let lines = text.as_bytes().chunks(80);
        let lines = lines.map(|line| std::str::from_utf8(line).expect("ASCII"));
        let lines: Vec<_> = lines.collect();
        format!(
            "[ 1.0] I root: waits\r\n{}\r\nhearth: more",
            lines.join("\r\n")
        )
    }

    #[test]
    fn the_recovery_key_alone_answers_at_the_console() {
        let world = World::new();
        let challenger = world.challenger();
        let shown = broken(&challenger.console_challenge().to_text());
        let read = ConsoleChallenge::parse(&shown).expect("valid");
        assert_eq!(read, challenger.console_challenge());
        let answer = read.answered(&world.recovery).expect("opens");
        assert!(answer.len() < 120, "{answer}");
        let key = challenger
            .accept_at_console(&format!(" {answer}\r"))
            .expect("opens");
        assert_eq!(key, world.key);

        let (challenger, key) = record(&world);
        let shown = broken(&challenger.console_challenge().to_text());
        let read = ConsoleChallenge::parse(&shown).expect("valid");
        let answer = read.answered(&world.recovery).expect("opens");
        assert_eq!(*challenger.accept_at_console(&answer).expect("opens"), key);
    }

    #[test]
    fn an_answer_opens_for_its_challenge_only() {
        let world = World::new();
        let (one, other) = (world.challenger(), world.challenger());
        let answer = one
            .console_challenge()
            .answered(&world.recovery)
            .expect("opens");
        assert_eq!(
            other.accept_at_console(&answer),
            Err(RecoveryError::ConsoleAnswer)
        );
        // Nor does one that was meant for the network, or for a record.
        let network = one
            .challenge()
            .answered(&world.recovery, &world.owner)
            .expect("opens");
        let network = BASE64.encode(network.wrapped_key);
        assert_eq!(
            one.accept_at_console(&network),
            Err(RecoveryError::ConsoleAnswer)
        );
        let (of_record, _) = record(&world);
        let (of_another, _) = record(&world);
        let answer = of_record
            .console_challenge()
            .answered(&world.recovery)
            .expect("opens");
        assert_eq!(
            one.accept_at_console(&answer),
            Err(RecoveryError::ConsoleAnswer)
        );
        assert_eq!(
            of_another.accept_at_console(&answer).err(),
            Some(RecoveryError::ConsoleAnswer)
        );
    }

    #[test]
    fn another_recovery_key_does_not_answer() {
        let world = World::new();
        let other = RecoveryKey::generate();
        let challenges = [
            world.challenger().console_challenge(),
            record(&world).0.console_challenge(),
        ];
        for challenge in challenges {
            assert_eq!(challenge.answered(&other), Err(RecoveryError::Wrapped));
        }
    }

    #[test]
    fn what_is_not_a_challenge_or_an_answer_is_named() {
        let world = World::new();
        let text = world.challenger().console_challenge().to_text();
        let cases = [
            ("", "no \"hearth-challenge:\""),
            (&text[..text.len() - 1], "no \";\""),
            ("hearth-challenge:????;", "not Base64"),
            ("hearth-challenge:;", "another version"),
            ("hearth-challenge:AAAA;", "another message"),
        ];
        for (text, found) in cases {
            let error = ConsoleChallenge::parse(text).expect_err(text).to_string();
            assert!(error.contains(found), "{text}: {error}");
        }
        let challenger = world.challenger();
        for (text, found) in [("yes!", "not Base64"), ("AAAA", "3 bytes instead of 80")] {
            let error = challenger
                .accept_at_console(text)
                .expect_err(text)
                .to_string();
            assert!(error.contains(found), "{text}: {error}");
        }
    }
}
