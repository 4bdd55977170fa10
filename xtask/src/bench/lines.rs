//! The output of programs that measure: each line is the samples of one record, as a JSON object.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Records;

/// A line of a program's output.
#[derive(Deserialize)]
pub(super) struct Line {
    pub(super) name: String,
    unit: String,
    pub(super) samples: Vec<f64>,
}

/// Adds the records of a program's output.
pub(super) fn take_in(output: &str, records: &mut Records) -> Result<Vec<Line>> {
    let parse = |line: &str| -> Result<Line> {
        serde_json::from_str(line).with_context(|| format!("not a record: {line}"))
    };
    let lines: Vec<Line> = output.lines().map(parse).collect::<Result<_>>()?;
    for line in &lines {
        let known = ["1/s", "s", "ratio", "cores", "bytes", "boolean", "calls"];
        let unit = known.into_iter().find(|unit| *unit == line.unit);
        let unit = unit.with_context(|| format!("{}: unknown unit {}", line.name, line.unit))?;
        records.add(&line.name, unit, &line.samples);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_records() {
        let mut records = Records::new("abc");
        let line = r#"{"name":"curator.cpu_1000","unit":"cores","samples":[0.25]}"#;
        let lines = take_in(line, &mut records).unwrap();
        assert_eq!(lines[0].samples, [0.25]);
        assert_eq!(records.all()[0].name, "curator.cpu_1000");
        assert!(take_in("progress", &mut records).is_err());
        assert!(
            take_in(
                r#"{"name":"x","unit":"furlongs","samples":[]}"#,
                &mut records
            )
            .is_err()
        );
    }
}
