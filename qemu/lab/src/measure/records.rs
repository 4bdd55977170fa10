//! Measurements: samples under a name, reduced to minimum, median and maximum.
//!
//! When two ways of doing the same are compared, the rounds alternate between them and the ratio is taken within each
//! round ([`ratio`]): a disturbance of the machine affects both, and a ratio of two separate medians would not cancel
//! it.

use serde::{Deserialize, Serialize};

/// One measured quantity.
#[derive(Serialize, Debug, Clone, PartialEq)]
pub struct Record {
    /// Dotted name, from the part to the quantity: `image.wall_ratio_genimage`.
    pub name: String,
    /// Number of samples.
    pub n: usize,
    /// The smallest sample.
    pub min: f64,
    /// The middle sample; for an even number the mean of the two in the middle.
    pub median: f64,
    /// The largest sample.
    pub max: f64,
    /// One of those that `docs/bench.md` lists.
    pub unit: &'static str,
    /// Revision of the measured source.
    pub revision: String,
}

/// Collects the records of one run.
#[derive(Debug)]
pub struct Records {
    revision: String,
    records: Vec<Record>,
}

impl Records {
    /// An empty collection for this revision.
    pub fn new(revision: impl Into<String>) -> Records {
        Records {
            revision: revision.into(),
            records: Vec::new(),
        }
    }

    /// Adds a quantity. Without samples there is no record.
    pub fn add(&mut self, name: impl Into<String>, unit: &'static str, samples: &[f64]) {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return;
        };
        self.records.push(Record {
            name: name.into(),
            n: sorted.len(),
            min,
            median: median(&sorted),
            max,
            unit,
            revision: self.revision.clone(),
        });
    }

    /// Adds the records of a program that measures: each line of its output is the samples of one, as a JSON object.
    ///
    /// # Errors
    /// If a line is something else, or its unit is unknown.
    pub fn take_in(&mut self, output: &str) -> Result<Vec<Line>, LineError> {
        let parse = |line: &str| -> Result<Line, LineError> {
            serde_json::from_str(line).map_err(|source| LineError::Record {
                line: line.to_owned(),
                source,
            })
        };
        let lines: Vec<Line> = output.lines().map(parse).collect::<Result<_, _>>()?;
        for line in &lines {
            let unit = UNITS.into_iter().find(|unit| *unit == line.unit);
            let unit = unit.ok_or_else(|| LineError::Unit {
                name: line.name.clone(),
                found: line.unit.clone(),
            })?;
            self.add(&line.name, unit, &line.samples);
        }
        Ok(lines)
    }

    /// All records, in the order they were added.
    pub fn all(&self) -> &[Record] {
        &self.records
    }

    /// All records as a JSON array.
    ///
    /// # Errors
    /// If a number cannot be represented in JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(&self.records)? + "\n")
    }
}

/// The units that programs measure in.
const UNITS: [&str; 7] = ["1/s", "s", "ratio", "cores", "bytes", "boolean", "calls"];

/// A line of a program's output.
#[derive(Deserialize, Debug)]
pub struct Line {
    /// The record's name.
    pub name: String,
    unit: String,
    /// Its samples.
    pub samples: Vec<f64>,
}

/// A line of a program's output that is no record.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// It is no JSON object with the fields of a record.
    #[error("expected a record, got {line:?}")]
    Record {
        /// The line.
        line: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Its unit is unknown.
    #[error("{name}: expected one of the units {UNITS:?}, got {found:?}")]
    Unit {
        /// The record's name.
        name: String,
        /// Its unit.
        found: String,
    },
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        (sorted[middle - 1] + sorted[middle]) / 2.0
    }
}

/// The ratio of the first to the second, round by round.
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(theirs)
        .map(|(ours, theirs)| ours / theirs)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_reduced() {
        let mut records = Records::new("abc");
        records.add("odd", "s", &[3.0, 1.0, 2.0]);
        records.add("even", "s", &[4.0, 1.0, 2.0, 3.0]);
        records.add("none", "s", &[]);
        let reduced: Vec<_> = records
            .all()
            .iter()
            .map(|r| (r.n, r.min, r.median, r.max))
            .collect();
        assert_eq!(reduced, [(3, 1.0, 2.0, 3.0), (4, 1.0, 2.5, 4.0)]);
    }

    #[test]
    fn lines_become_records() {
        let mut records = Records::new("abc");
        let line = r#"{"name":"curator.cpu_1000","unit":"cores","samples":[0.25]}"#;
        let lines = records.take_in(line).unwrap();
        assert_eq!(lines[0].samples, [0.25]);
        assert_eq!(records.all()[0].name, "curator.cpu_1000");
        assert!(records.take_in("progress").is_err());
        let other = records.take_in(r#"{"name":"x","unit":"furlongs","samples":[]}"#);
        assert!(matches!(other, Err(LineError::Unit { .. })));
    }

    #[test]
    fn ratios_are_of_pairs() {
        // The medians of both are 2; the machine was slow in different rounds.
        assert_eq!(ratio(&[1.0, 2.0, 9.0], &[2.0, 1.0, 9.0]), [0.5, 2.0, 1.0]);
    }

    #[test]
    fn json_has_the_promised_fields() {
        let mut records = Records::new("abc");
        records.add("size.init_bytes", "bytes", &[7.0]);
        let value: serde_json::Value = serde_json::from_str(&records.json().unwrap()).unwrap();
        assert_eq!(
            value,
            serde_json::json!([{
                "name": "size.init_bytes", "n": 1, "min": 7.0, "median": 7.0, "max": 7.0,
                "unit": "bytes", "revision": "abc"
            }])
        );
    }
}
