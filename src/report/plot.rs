//! Memory over time as a picture: one to three panels above each other, as SVG or PNG, and as CSV.

use std::fmt::Write;

use tiny_skia::{Color, FillRule, Paint, PathBuilder, Pixmap, Rect, Stroke, Transform};

/// Colours of lines, told apart by most colour-blind people too.
const COLOURS: [(u8, u8, u8); 8] = [
    (0x00, 0x72, 0xB2),
    (0xD5, 0x5E, 0x00),
    (0x00, 0x9E, 0x73),
    (0xCC, 0x79, 0xA7),
    (0xE6, 0x9F, 0x00),
    (0x56, 0xB4, 0xE9),
    (0x00, 0x00, 0x00),
    (0x99, 0x99, 0x33),
];
const GREY: (u8, u8, u8) = (0x88, 0x88, 0x88);
const LIGHT: (u8, u8, u8) = (0xE4, 0xE4, 0xE4);
const BLACK: (u8, u8, u8) = (0x22, 0x22, 0x22);
const WIDTH: f32 = 960.0;
const PANEL: f32 = 240.0;
const LEFT: f32 = 90.0;
const RIGHT: f32 = 20.0;
const TOP: f32 = 44.0;
const GAP: f32 = 52.0;
/// Width and height of a letter.
const LETTER: (f32, f32) = (8.0, 8.0);

/// A line: its name and a value for each time.
#[derive(Debug, Clone, Default)]
pub struct Curve {
    /// Shown in the legend.
    pub label: String,
    /// In order of the times.
    pub values: Vec<f64>,
}

/// One diagram.
#[derive(Debug, Clone, Default)]
pub struct Panel {
    /// What its vertical axis shows.
    pub title: String,
    /// Values are divided by this to be shown.
    pub unit: f64,
    /// The lines.
    pub curves: Vec<Curve>,
}

/// Panels on one axis of time.
#[derive(Debug, Clone, Default)]
pub struct Plot {
    /// Above all.
    pub title: String,
    /// Seconds since the start.
    pub times: Vec<f64>,
    /// From the top down.
    pub panels: Vec<Panel>,
}

/// What a picture is made of.
trait Canvas {
    fn line(&mut self, points: &[(f32, f32)], colour: (u8, u8, u8), width: f32);
    fn rect(&mut self, at: (f32, f32), size: (f32, f32), colour: (u8, u8, u8));
    /// `anchor` is the part of the text's width that is left of `at`; `at` is the middle of its height.
    fn text(&mut self, at: (f32, f32), anchor: f32, text: &str);
}

impl Plot {
    fn height(&self) -> f32 {
        let legend = self.curves().count().div_ceil(2) as f32 * 16.0;
        TOP + self.panels.len() as f32 * (PANEL + GAP) + legend
    }

    /// Lines of the last panel, which the legend names.
    fn curves(&self) -> impl Iterator<Item = &Curve> {
        let last = self.panels.last().map_or(&[][..], |panel| &panel.curves);
        last.iter().filter(|curve| !curve.label.is_empty())
    }

    fn draw(&self, canvas: &mut dyn Canvas) {
        canvas.rect((0.0, 0.0), (WIDTH, self.height()), (0xFF, 0xFF, 0xFF));
        canvas.text((WIDTH / 2.0, 16.0), 0.5, &self.title);
        let end = self.times.last().copied().unwrap_or(0.0).max(1e-3);
        for (place, panel) in self.panels.iter().enumerate() {
            let top = TOP + place as f32 * (PANEL + GAP);
            self.draw_panel(canvas, panel, top, end);
        }
        let begin = TOP + self.panels.len() as f32 * (PANEL + GAP) - 4.0;
        for (place, curve) in self.curves().enumerate() {
            let at = (LEFT + (place % 2) as f32 * 430.0, begin + (place / 2) as f32 * 16.0);
            canvas.line(&[at, (at.0 + 18.0, at.1)], colour(place), 3.0);
            canvas.text((at.0 + 26.0, at.1), 0.0, &shortened(&curve.label, 48));
        }
    }

    fn draw_panel(&self, canvas: &mut dyn Canvas, panel: &Panel, top: f32, end: f64) {
        let (width, bottom) = (WIDTH - LEFT - RIGHT, top + PANEL);
        let values = panel.curves.iter().flat_map(|curve| &curve.values);
        let highest = values.fold(0.0, |a: f64, b| a.max(b / panel.unit));
        let highest = if highest > 0.0 { highest } else { 1.0 };
        let step = nice_step(highest / 5.0);
        let limit = (highest / step).ceil() * step;
        let x = |time: f64| LEFT + (time / end) as f32 * width;
        let y = |value: f64| bottom - (value / limit) as f32 * PANEL;
        for tick in 0..=(limit / step).round() as u32 {
            let value = f64::from(tick) * step;
            canvas.line(&[(LEFT, y(value)), (LEFT + width, y(value))], LIGHT, 1.0);
            canvas.text((LEFT - 6.0, y(value)), 1.0, &number(value, step));
        }
        let step = nice_step(end / 8.0);
        for tick in 0..=(end / step).floor() as u32 {
            let time = f64::from(tick) * step;
            canvas.line(&[(x(time), bottom), (x(time), bottom + 4.0)], GREY, 1.0);
            canvas.text((x(time), bottom + 13.0), 0.5, &number(time, step));
        }
        canvas.text((LEFT + width, bottom + 27.0), 1.0, "seconds");
        canvas.text((LEFT, top - 12.0), 0.0, &panel.title);
        canvas.line(&[(LEFT, top), (LEFT, bottom), (LEFT + width, bottom)], GREY, 1.0);
        for (place, curve) in panel.curves.iter().enumerate() {
            let points = self
                .times
                .iter()
                .zip(&curve.values)
                .map(|(time, value)| (x(*time), y(value / panel.unit)));
            let points: Vec<_> = points.collect();
            canvas.line(&points, colour(place), 1.6);
        }
    }

    /// The picture as SVG.
    pub fn svg(&self) -> String {
        let height = self.height();
        let mut svg = Svg(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"monospace\" font-size=\"12\">\n"
        ));
        self.draw(&mut svg);
        svg.0 + "</svg>\n"
    }

    /// The picture as PNG, twice as large. `None` if there is no memory for it.
    pub fn png(&self) -> Option<Vec<u8>> {
        let mut raster = Raster(Pixmap::new(2 * WIDTH as u32, 2 * self.height() as u32)?);
        self.draw(&mut raster);
        raster.0.encode_png().ok()
    }
}

fn colour(place: usize) -> (u8, u8, u8) {
    COLOURS[place % COLOURS.len()]
}

/// 1, 2 or 5 times a power of ten, not below `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|digit| digit * power);
    steps
        .into_iter()
        .find(|step| *step >= least * 0.999_999)
        .unwrap_or(10.0 * power)
}

/// With as many decimals as the step needs.
fn number(value: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}

/// The end of a text is what tells files apart.
fn shortened(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let rest: String = text.chars().skip(count - most + 3).collect();
    format!("...{rest}")
}

struct Svg(String);

impl Canvas for Svg {
    fn line(&mut self, points: &[(f32, f32)], (r, g, b): (u8, u8, u8), width: f32) {
        self.0 += "<polyline fill=\"none\" points=\"";
        for (x, y) in points {
            let _ = write!(self.0, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(
            self.0,
            "\" stroke=\"#{r:02x}{g:02x}{b:02x}\" stroke-width=\"{width}\"/>"
        );
    }

    fn rect(&mut self, (x, y): (f32, f32), (width, height): (f32, f32), (r, g, b): (u8, u8, u8)) {
        let _ = writeln!(
            self.0,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"#{r:02x}{g:02x}{b:02x}\"/>"
        );
    }

    fn text(&mut self, (x, y): (f32, f32), anchor: f32, text: &str) {
        let anchor = match anchor {
            a if a >= 1.0 => "end",
            a if a > 0.0 => "middle",
            _ => "start",
        };
        let _ = write!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">",
            y + 4.0
        );
        for c in text.chars() {
            match c {
                '&' => self.0 += "&amp;",
                '<' => self.0 += "&lt;",
                '>' => self.0 += "&gt;",
                c if c.is_control() => self.0.push('\u{FFFD}'),
                c => self.0.push(c),
            }
        }
        self.0 += "</text>\n";
    }
}

struct Raster(Pixmap);

impl Raster {
    fn paint((r, g, b): (u8, u8, u8)) -> Paint<'static> {
        let mut paint = Paint::default();
        paint.set_color(Color::from_rgba8(r, g, b, 0xFF));
        paint
    }
}

impl Canvas for Raster {
    fn line(&mut self, points: &[(f32, f32)], colour: (u8, u8, u8), width: f32) {
        let mut path = PathBuilder::new();
        for (place, (x, y)) in points.iter().enumerate() {
            if place == 0 {
                path.move_to(*x, *y);
            } else {
                path.line_to(*x, *y);
            }
        }
        let stroke = Stroke {
            width,
            ..Stroke::default()
        };
        if let Some(path) = path.finish() {
            let twice = Transform::from_scale(2.0, 2.0);
            self.0.stroke_path(&path, &Self::paint(colour), &stroke, twice, None);
        }
    }

    fn rect(&mut self, (x, y): (f32, f32), (width, height): (f32, f32), colour: (u8, u8, u8)) {
        if let Some(rect) = Rect::from_xywh(x, y, width, height) {
            let twice = Transform::from_scale(2.0, 2.0);
            self.0.fill_rect(rect, &Self::paint(colour), twice, None);
        }
    }

    fn text(&mut self, (x, y): (f32, f32), anchor: f32, text: &str) {
        use font8x8::UnicodeFonts;
        let begin = x - anchor * text.chars().count() as f32 * LETTER.0;
        let mut path = PathBuilder::new();
        for (place, letter) in text.chars().enumerate() {
            let rows = font8x8::BASIC_FONTS
                .get(letter)
                .or_else(|| font8x8::LATIN_FONTS.get(letter))
                .or_else(|| font8x8::GREEK_FONTS.get(letter))
                .or_else(|| font8x8::BASIC_FONTS.get('?'));
            for (row, bits) in rows.unwrap_or_default().into_iter().enumerate() {
                for column in (0..8).filter(|column| bits >> column & 1 == 1) {
                    let left = begin + place as f32 * LETTER.0 + column as f32;
                    let dot = Rect::from_xywh(left, y - LETTER.1 / 2.0 + row as f32, 1.0, 1.0);
                    dot.into_iter().for_each(|dot| path.push_rect(dot));
                }
            }
        }
        if let Some(path) = path.finish() {
            let twice = Transform::from_scale(2.0, 2.0);
            let paint = Self::paint(BLACK);
            self.0.fill_path(&path, &paint, FillRule::Winding, twice, None);
        }
    }
}

/// A table with a first line of names; names with commas, quotes or line breaks are quoted.
pub fn csv(names: &[String], rows: impl IntoIterator<Item = Vec<f64>>) -> String {
    let names: Vec<_> = names
        .iter()
        .map(|name| {
            if name.contains([',', '"', '\n', '\r']) {
                format!("\"{}\"", name.replace('"', "\"\""))
            } else {
                name.clone()
            }
        })
        .collect();
    let mut text = names.join(",") + "\n";
    for row in rows {
        let row: Vec<_> = row.iter().map(f64::to_string).collect();
        text += &row.join(",");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(
            [0.3, 1.0, 1.1, 4.0, 7.0, 0.0012].map(nice_step),
            [0.5, 1.0, 2.0, 5.0, 10.0, 0.002]
        );
        assert_eq!(
            (number(1.5, 0.5), number(20.0, 10.0)),
            ("1.5".to_owned(), "20".to_owned())
        );
        assert_eq!(shortened("/srv/app/main.py:12", 10), "...n.py:12");
    }

    #[test]
    fn pictures_hold_their_lines_and_names() {
        let plot = Plot {
            title: "run <&>".to_owned(),
            times: vec![1.0, 2.0],
            panels: vec![Panel {
                title: "MiB".to_owned(),
                unit: 1.0,
                curves: vec![Curve {
                    label: "a\u{1b}".to_owned(),
                    values: vec![0.0, 3.0],
                }],
            }],
        };
        let svg = plot.svg();
        assert!(svg.contains("run &lt;&amp;&gt;") && svg.contains("a\u{FFFD}") && !svg.contains('\u{1b}'));
        assert!(svg.contains("points=\"515.0,284.0 940.0,44.0 \""), "{svg}");
        let png = plot.png().unwrap();
        assert!(png.starts_with(b"\x89PNG"));
        let empty = Plot {
            panels: vec![Panel::default()],
            ..Plot::default()
        };
        assert!(empty.svg().ends_with("</svg>\n") && empty.png().is_some());
    }

    #[test]
    fn tables_quote_names() {
        let names = ["t".to_owned(), "a,\"b\"".to_owned()];
        assert_eq!(csv(&names, [vec![1.0, 2.5]]), "t,\"a,\"\"b\"\"\"\n1,2.5\n");
    }
}
