//! How the original prints sizes, and which colours and font sizes it chooses. The numbers are documented with it.

/// A number of bytes: `1.2kB`, powers of 1024, a prefix from 1.1 times its unit on. The original writes one byte as
/// `1024.0mB`; `compat` does so too.
pub fn bytes_string(bytes: u64, compat: bool) -> String {
    if bytes == 0 {
        return "0.0B".to_owned();
    }
    let value = bytes as f64;
    let power = ((value / 1.1).ln() / 1024f64.ln()).floor() as i32;
    if power < 0 && !compat {
        return format!("{value:.1}B");
    }
    let number = value * 1024f64.powi(-power);
    let prefix = match power {
        ..0 => "m",
        0 => "",
        _ => ["k", "M", "G", "T", "P", "E"]
            .get(power as usize - 1)
            .copied()
            .unwrap_or("Z"),
    };
    format!("{number:.1}{prefix}B")
}

/// The colour of a fraction, from light blue (0) over violet to red (1), as `#rrggbb`.
pub fn colour(fraction: f64) -> String {
    let (saturation, value) = (0.7, 0.95);
    let hue = 200.0 / 360.0 + (1.0 - 200.0 / 360.0) * fraction;
    let sector = (hue * 6.0).trunc();
    let f = hue * 6.0 - sector;
    let p = value * (1.0 - saturation);
    let q = value * (1.0 - saturation * f);
    let t = value * (1.0 - saturation * (1.0 - f));
    let (red, green, blue) = match sector.rem_euclid(6.0) as u32 {
        0 => (value, t, p),
        1 => (q, value, p),
        2 => (p, value, t),
        3 => (p, q, value),
        4 => (t, p, value),
        _ => (value, p, q),
    };
    let channel = |part: f64| (255.0 * part) as u8;
    format!("#{:02x}{:02x}{:02x}", channel(red), channel(green), channel(blue))
}

/// The font size of a fraction: 15 up to 1 %, then in proportion to 200 for all.
pub fn font_size(fraction: f64) -> u64 {
    (15.0 + (fraction - 0.01).max(0.0) * ((200.0 - 15.0) / (1.0 - 0.01))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_as_documented() {
        for (bytes, text) in [
            (0, "0.0B"),
            (1, "1024.0mB"),
            (2, "2.0B"),
            (1000, "1000.0B"),
            (1126, "1126.0B"),
            (1127, "1.1kB"),
            (1_047_552, "1023.0kB"),
            (1_153_433, "1126.4kB"),
            (1_153_434, "1.1MB"),
            (1 << 40, "1024.0GB"),
            (1_000_000_000_000_000, "909.5TB"),
        ] {
            assert_eq!(bytes_string(bytes, true), text);
        }
        assert_eq!(bytes_string(1, false), "1.0B");
        assert_eq!(bytes_string(u64::MAX, false), "16.0EB");
    }

    #[test]
    fn colours_and_fonts_are_as_documented() {
        let colours = [0.0, 0.01, 0.25, 0.5, 0.75, 1.0, 2.0].map(colour);
        assert_eq!(
            colours,
            [
                "#48b9f2", "#48b5f2", "#4848f2", "#b948f2", "#f248b9", "#f24848", "#48f2b9"
            ]
        );
        assert_eq!(
            [0.0, 0.02, 0.25, 0.5, 0.75, 1.0].map(font_size),
            [15, 16, 59, 106, 153, 200]
        );
    }
}
