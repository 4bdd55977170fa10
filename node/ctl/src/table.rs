//! Tables with aligned columns.

use std::fmt;

/// Rows under headings. Columns are two spaces apart and as wide as their widest cell. An empty
/// cell is printed as `-`, so that each row has the same number of fields.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self {
            rows: vec![headings.iter().map(|&text| text.to_owned()).collect()],
        }
    }

    /// Appends a row, which has as many cells as there are headings.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.rows[0].len());
        let cell = |text: String| {
            if text.is_empty() {
                "-".to_owned()
            } else {
                text
            }
        };
        self.rows.push(cells.into_iter().map(cell).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:width$}  "));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Replaces control characters, so that text from a server cannot control the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["A", "LONGER", "C"]);
        table.row(["wide cell".into(), String::new(), "é".into()]);
        table.row(["x".into(), "y".into(), String::new()]);
        assert_eq!(
            table.to_string(),
            "A          LONGER  C\n\
             wide cell  -       é\n\
             x          y       -\n"
        );
    }

    #[test]
    fn terminals_are_not_driven_from_afar() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
