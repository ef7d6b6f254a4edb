//! What grows: live memory at several moments of a recording, compared.

use crate::profile::model::Live;
use crate::profile::reader::{ReadError, Reader};
use std::collections::HashMap;
use std::time::Duration;

/// How far from zero a growth must be to be believed, in standard deviations.
const SIGMAS: f64 = 3.0;

/// A site whose live memory grows.
#[derive(Debug, Clone, PartialEq)]
pub struct Growth {
    /// Allocating line: file, line, function.
    pub site: (String, u32, String),
    /// Growth from the first moment to the end, in bytes.
    pub bytes: f64,
    /// Half the width of its 95 % interval.
    pub margin: f64,
}

/// Sites that have grown from `since` to the middle of the rest and from there to the end, both times by more than chance
/// explains; the largest first.
///
/// # Errors
/// When the profile cannot be read.
pub fn growing(reader: &Reader, since: Duration) -> Result<Vec<Growth>, ReadError> {
    let middle = since + reader.elapsed()?.saturating_sub(since) / 2;
    let moments = [Some(since), Some(middle), None];
    let mut sites: HashMap<(String, u32, String), [Live; 3]> = HashMap::new();
    for (place, moment) in moments.into_iter().enumerate() {
        for (index, live) in reader.live_at(moment)?.traces {
            let Some(frame) = reader.frames(index).and_then(|mut frames| frames.pop()) else {
                continue;
            };
            let key = (
                frame.file.into_owned(),
                frame.line,
                frame.function.unwrap_or_default().to_owned(),
            );
            if let Some(sum) = sites.entry(key).or_default().get_mut(place) {
                sum.add(&live);
            }
        }
    }
    let mut growing: Vec<Growth> = sites
        .into_iter()
        .filter(|(_, [first, middle, last])| is_growth(first, middle) && is_growth(middle, last))
        .map(|(site, [first, _, last])| {
            let (bytes, sigma) = difference(&first, &last);
            Growth {
                site,
                bytes,
                margin: 1.96 * sigma,
            }
        })
        .collect();
    growing.sort_by(|a, b| b.bytes.total_cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
    Ok(growing)
}

/// Growth and its standard deviation. Blocks that are alive at both moments were sampled once and cancel; what is left is
/// at least the difference of the variances, and exactly that when nothing of the first moment was freed.
fn difference(from: &Live, to: &Live) -> (f64, f64) {
    (
        to.bytes - from.bytes,
        (to.bytes_variance - from.bytes_variance).abs().sqrt(),
    )
}

fn is_growth(from: &Live, to: &Live) -> bool {
    let (bytes, sigma) = difference(from, to);
    bytes > 0.0 && bytes > SIGMAS * sigma
}
