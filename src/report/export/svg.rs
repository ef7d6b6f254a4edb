//! A flame graph as SVG, drawn by the inferno crate from collapsed stacks.
//!
//! The picture has inferno's script for zoom and search, which runs when a browser opens the file by itself; it loads
//! nothing. What the picture cannot show (narrower than a hundredth of a pixel) is left out by inferno.

use inferno::flamegraph::{Direction, Options, TextTruncateDirection, from_lines};

use super::{Export, Metric, collapsed::collapsed};
use crate::report::human::{Human, bytes, clean, count};

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SvgError {
    /// Nothing to draw.
    #[error("there are no {0} at {1}, so there is nothing to draw; try another --at")]
    Empty(&'static str, Human),
    /// inferno could not draw.
    #[error("the flame graph cannot be drawn")]
    Draw(#[from] std::io::Error),
}

/// The picture. The outermost frame is at the top.
///
/// # Errors
/// If nothing is counted at that moment.
pub fn svg(export: &Export<'_>, metric: Metric) -> Result<Vec<u8>, SvgError> {
    let text = collapsed(export, metric);
    if text.is_empty() {
        return Err(SvgError::Empty(metric.title(), Human(export.at)));
    }
    let mut options = Options::default();
    options.title = clean(&export.name).into_owned();
    options.subtitle = Some(subtitle(export, metric));
    options.count_name = if metric.is_bytes() { "bytes" } else { "objects" }.to_owned();
    options.direction = Direction::Inverted;
    // A function's name, which comes first, says more than its line.
    options.text_truncate_direction = TextTruncateDirection::Right;
    options.hash = true;
    options.deterministic = true;
    let mut out = Vec::new();
    from_lines(&mut options, text.lines(), &mut out)?;
    Ok(out)
}

/// What is shown and how sure it is.
pub(super) fn subtitle(export: &Export<'_>, metric: Metric) -> String {
    let total = &export.total;
    let shown = |value: f64| if metric.is_bytes() { bytes(value) } else { count(value) };
    let margin = match metric {
        Metric::LiveBytes => format!(" ± {}", bytes(total.bytes_margin())),
        Metric::LiveObjects => format!(" ± {}", count(total.objects_margin())),
        Metric::AllocBytes | Metric::AllocObjects => String::new(),
    };
    format!(
        "{}: {}{margin} at {}",
        metric.title(),
        shown(metric.of(total)),
        Human(export.at)
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EVIL, assert_clean, evil, export, sample};
    use super::*;

    fn drawn(export: &Export<'_>) -> String {
        String::from_utf8(svg(export, Metric::LiveBytes).unwrap()).unwrap()
    }

    #[test]
    fn frames_are_drawn_with_their_numbers() {
        let text = drawn(&sample());
        for part in [
            "<title>main (app.py:3) (1,500 bytes, 90.85%)</title>",
            "<title>grow (leak.py:7) (1,000 bytes, 60.57%)</title>",
            "<title>OTHER (101 bytes, 6.12%)</title>",
            "live bytes: 1.6 KiB ± 220 B at 10s",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert_eq!(text, drawn(&sample()), "the same profile gives the same picture");
    }

    #[test]
    fn names_are_text_and_nothing_else() {
        let text = drawn(&evil());
        assert_clean(&text.replace('\t', " "));
        assert!(!text.contains("alert(1)</script>") && !text.contains("<b>"), "{text}");
        assert!(text.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
        assert!(!text.contains('\u{FFFE}'), "no character that XML forbids");
        assert_eq!(EVIL.len(), 8);
    }

    #[test]
    fn nothing_to_draw_is_said() {
        let error = svg(&export(vec![]), Metric::AllocObjects).unwrap_err().to_string();
        assert_eq!(
            error,
            "there are no allocated objects at 10s, so there is nothing to draw; try another --at"
        );
    }
}
