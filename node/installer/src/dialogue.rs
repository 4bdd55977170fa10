//! The question on the console: on which disk?
//!
//! The answer is the name of a disk, typed in full. For one that is not empty it has to be typed twice. Any other answer is
//! an error that says what was expected, and the question is asked again.

use hearth_host::disks::choice::{Candidate, Needs, Obstacle};
use hearth_host::disks::content::Content;

/// What is asked for the second time.
#[derive(Debug, Default)]
pub struct Dialogue {
    /// The disk whose content is to be lost, if the answer is its name once more.
    confirms: Option<String>,
}

/// Why an answer is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum AnswerError {
    #[error("expected the name of a disk, got {found:?}")]
    Unknown { found: String },
    #[error("expected {wanted:?} once more, got {found:?}; nothing was changed")]
    NotConfirmed { wanted: String, found: String },
    #[error("{disk}: {obstacle}")]
    Unfit { disk: String, obstacle: Obstacle },
}

/// The result of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The installation can begin on this disk.
    Chosen(&'a Candidate),
    /// This is asked next.
    Confirm(String),
}

/// The question, a line each.
pub fn question(disks: &[Candidate], needs: Needs) -> Vec<String> {
    let mut lines = vec!["The disks of this machine:".to_owned()];
    lines.extend(disks.iter().map(|disk| match disk.obstacle(needs) {
        None => format!("  {disk}"),
        Some(obstacle) => format!("  {disk}; cannot be used: {obstacle}"),
    }));
    lines.push("Type the name of the disk on which the node is to be installed:".to_owned());
    lines
}

impl Dialogue {
    /// Takes a line that was typed.
    ///
    /// # Errors
    /// If it chooses no disk. The next answer is a first one again.
    pub fn answer<'a>(
        &mut self,
        line: &str,
        disks: &'a [Candidate],
        needs: Needs,
    ) -> Result<Answer<'a>, AnswerError> {
        let found = line.trim().to_owned();
        if let Some(wanted) = self.confirms.take_if(|wanted| *wanted != found) {
            return Err(AnswerError::NotConfirmed { wanted, found });
        }
        let disk = disks.iter().find(|disk| disk.name == found);
        let disk = disk.ok_or(AnswerError::Unknown { found })?;
        if let Some(obstacle) = disk.obstacle(needs) {
            return Err(AnswerError::Unfit {
                disk: disk.name.clone(),
                obstacle,
            });
        }
        let is_confirmed = self.confirms.take().is_some();
        if is_confirmed || disk.content.is_vacant() {
            return Ok(Answer::Chosen(disk));
        }
        self.confirms = Some(disk.name.clone());
        let Candidate { name, content, .. } = disk;
        let loss = match content {
            Content::Node => "a Hearth node, with its data",
            content => &content.to_string(),
        };
        Ok(Answer::Confirm(format!(
            "{name} has {loss}. Everything on it will be lost. To go on, type its name once more:"
        )))
    }
}

#[cfg(test)]
mod tests {
    use hearth_host::disks::choice::testing::{NEEDS, disk, full};

    use super::*;

    #[test]
    fn an_empty_disk_is_chosen_by_its_name() {
        let disks = [full("sda"), disk("nvme0n1")];
        let mut dialogue = Dialogue::default();
        for wrong in ["", "1", "nvme", "/dev/nvme0n1", "NVME0N1", "yes"] {
            let error = dialogue.answer(wrong, &disks, NEEDS).unwrap_err();
            let found = wrong.to_owned();
            assert_eq!(error, AnswerError::Unknown { found });
        }
        let answer = dialogue.answer(" nvme0n1\r", &disks, NEEDS);
        assert_eq!(answer, Ok(Answer::Chosen(&disks[1])));
    }

    #[test]
    fn a_disk_that_is_not_empty_is_chosen_by_its_name_twice() {
        let disks = [full("sda"), full("sdb")];
        let mut dialogue = Dialogue::default();
        let asked = dialogue.answer("sda", &disks, NEEDS).unwrap();
        let Answer::Confirm(text) = asked else {
            panic!("{asked:?}");
        };
        assert!(text.starts_with("sda has a file system (xfs). Everything"));
        let error = dialogue.answer("sdb", &disks, NEEDS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected \"sda\" once more, got \"sdb\"; nothing was changed"
        );
        // From the beginning.
        let asked = dialogue.answer("sdb", &disks, NEEDS).unwrap();
        assert!(matches!(asked, Answer::Confirm(_)), "{asked:?}");
        let answer = dialogue.answer("sdb", &disks, NEEDS);
        assert_eq!(answer, Ok(Answer::Chosen(&disks[1])));
    }

    #[test]
    fn the_question_says_what_each_disk_is_and_which_cannot_be_used() {
        let small = Candidate {
            size: 1 << 30,
            ..disk("sdb")
        };
        let disks = [full("sda"), small];
        let lines = question(&disks, NEEDS).join("\n");
        assert!(lines.contains("  sda (Disk, serial SDA, 8.5 GB): a file system (xfs)\n"));
        assert!(lines.contains("sdb (Disk, serial SDB, 1.0 GB): empty; cannot be used"));
        let error = Dialogue::default().answer("sdb", &disks, NEEDS);
        assert!(matches!(error, Err(AnswerError::Unfit { .. })), "{error:?}");
    }
}
