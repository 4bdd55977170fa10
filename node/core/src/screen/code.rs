//! QR codes of text, drawn by characters of half a line each, so that a code of 29 points is 17 lines high.

use hearth_sys::screen::{Line, Span};
use qrcodegen::{QrCode, QrCodeEcc};

/// The margin that cameras need, in points: half of what the standard wants is enough for them.
const MARGIN: i32 = 2;

/// The lines of a code; `None` if the text is too long for one that fits into this many columns and rows.
pub(super) fn of(text: &str, columns: usize, rows: usize) -> Option<Vec<Line>> {
    let code = QrCode::encode_text(text, QrCodeEcc::Low).ok()?;
    let range = -MARGIN..code.size() + MARGIN;
    let width = range.len();
    if width > columns || width.div_ceil(2) > rows {
        return None;
    }
    let line = |y: i32| {
        let points = range
            .clone()
            .map(|x| (code.get_module(x, y), code.get_module(x, y + 1)));
        let text = points.map(|point| match point {
            (true, true) => '█',
            (true, false) => '▀',
            (false, true) => '▄',
            (false, false) => ' ',
        });
        vec![Span::Reversed(text.collect())]
    };
    Some(range.clone().step_by(2).map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The points that the lines show, without the margin.
    fn points(lines: &[Line]) -> Vec<Vec<bool>> {
        let mut points = Vec::new();
        for line in lines {
            let [Span::Reversed(text)] = &line[..] else {
                panic!("{line:?}");
            };
            let upper = text.chars().map(|c| matches!(c, '█' | '▀'));
            let lower = text.chars().map(|c| matches!(c, '█' | '▄'));
            points.push(upper.collect());
            points.push(lower.collect());
        }
        points
    }

    #[test]
    fn a_key_fits_beside_the_text() {
        let key = "0123456789ABCDEF".repeat(4);
        let lines = of(&key, 38, 20).unwrap();
        assert_eq!(lines.len(), 17);
        let code = QrCode::encode_text(&key, QrCodeEcc::Low).unwrap();
        let shown = points(&lines);
        for (y, row) in shown.iter().enumerate() {
            assert_eq!(row.len(), 33);
            for (x, point) in row.iter().enumerate() {
                let (x, y) = (x as i32 - MARGIN, y as i32 - MARGIN);
                assert_eq!(*point, code.get_module(x, y), "{x} {y}");
            }
        }
        assert_eq!(of(&key, 32, 20), None);
        assert_eq!(of(&key, 38, 16), None);
        assert_eq!(of(&"x".repeat(5000), 1000, 1000), None);
    }
}
