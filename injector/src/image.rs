//! The shim's ELF image: laid out, relocated, checked.

use goblin::elf::{Elf, program_header, reloc};
use zerocopy::{FromBytes, IntoBytes};

use pyheap_protocol::control::ShimHeader;
use pyheap_protocol::{IDENTITY_MAGIC, PROTOCOL};

/// Most memory that an image may ask for.
const MAX_IMAGE_BYTES: u64 = 4 << 20;
/// Pages.
const PAGE: u64 = 4096;

/// What is wrong with an image. These are defects of a build, not of a target.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Not an ELF file.
    #[error("the shim is not an ELF image")]
    Elf(#[from] goblin::error::Error),
    /// An ELF file, but not a freestanding one of ours.
    #[error("the shim's image is not usable: {0}")]
    Unusable(&'static str),
}

/// A parsed image, ready to be placed anywhere.
#[derive(Debug)]
pub struct Image {
    /// Up to the last one that is not zero; relocations lie within.
    bytes: Vec<u8>,
    /// In whole pages: zeros follow the bytes.
    len: u64,
    relocations: Vec<(u64, u64)>,
    text: std::ops::Range<u64>,
    header: u64,
}

/// `value` rounded up to whole pages.
#[must_use]
pub const fn pages(value: u64) -> u64 {
    value.div_ceil(PAGE) * PAGE
}

impl Image {
    /// Parses `file` and lays it out as it will be in memory.
    ///
    /// # Errors
    /// When it is not what the shim's build promises: loadable at any address with relative relocations alone.
    pub fn parse(file: &[u8]) -> Result<Self, ImageError> {
        let elf = Elf::parse(file)?;
        if !elf.libraries.is_empty() {
            return Err(ImageError::Unusable("it needs libraries"));
        }
        let mut len = 0;
        let mut text = None;
        for segment in &elf.program_headers {
            match segment.p_type {
                program_header::PT_TLS => return Err(ImageError::Unusable("it has thread-local storage")),
                program_header::PT_LOAD => {
                    len = len.max(pages(segment.p_vaddr.saturating_add(segment.p_memsz)));
                    if segment.is_executable() {
                        let start = segment.p_vaddr / PAGE * PAGE;
                        text = Some(start..pages(segment.p_vaddr + segment.p_memsz));
                    }
                }
                _ => {}
            }
        }
        if len == 0 || len > MAX_IMAGE_BYTES {
            return Err(ImageError::Unusable("its size is absurd"));
        }
        let mut bytes = vec![0; len as usize];
        for segment in elf
            .program_headers
            .iter()
            .filter(|s| s.p_type == program_header::PT_LOAD)
        {
            let from = segment.p_offset as usize..(segment.p_offset + segment.p_filesz) as usize;
            let to = segment.p_vaddr as usize..(segment.p_vaddr + segment.p_filesz) as usize;
            match (bytes.get_mut(to), file.get(from)) {
                (Some(to), Some(from)) => to.copy_from_slice(from),
                _ => return Err(ImageError::Unusable("a segment lies outside the file")),
            }
        }
        let mut relocations = Vec::new();
        for entry in elf
            .dynrelas
            .iter()
            .chain(elf.dynrels.iter())
            .chain(elf.pltrelocs.iter())
        {
            if entry.r_type != reloc::R_X86_64_RELATIVE {
                return Err(ImageError::Unusable("it has relocations that need symbols"));
            }
            relocations.push((entry.r_offset, entry.r_addend.unwrap_or(0) as u64));
        }
        let header = elf
            .dynsyms
            .iter()
            .find(|symbol| elf.dynstrtab.get_at(symbol.st_name) == Some("pyheap_shim"))
            .ok_or(ImageError::Unusable("it has no header"))?
            .st_value;
        let text = text.ok_or(ImageError::Unusable("it has no text"))?;
        let used = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        let relocated = relocations.iter().map(|&(offset, _)| offset.saturating_add(8));
        let end = relocated.chain([used as u64, header.saturating_add(size_of::<ShimHeader>() as u64)]);
        bytes.truncate(end.max().map_or(0, |end| usize::try_from(end).unwrap_or(usize::MAX)));
        let image = Self {
            bytes,
            len,
            relocations,
            text,
            header,
        };
        let header = image.header_at(0)?;
        if header.magic != IDENTITY_MAGIC || header.protocol != u64::from(PROTOCOL) {
            return Err(ImageError::Unusable("it speaks another protocol"));
        }
        Ok(image)
    }

    /// Bytes of memory that the image takes, in whole pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// An image is never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The executable pages, relative to the image.
    #[must_use]
    pub fn text(&self) -> std::ops::Range<u64> {
        self.text.clone()
    }

    /// Offset of the [`ShimHeader`].
    #[must_use]
    pub fn header_offset(&self) -> u64 {
        self.header
    }

    /// The header as it will be at `base`.
    ///
    /// # Errors
    /// When the image has no room for it.
    pub fn header_at(&self, base: u64) -> Result<ShimHeader, ImageError> {
        let cut = || ImageError::Unusable("its header is cut");
        let at = usize::try_from(self.header).map_err(|_| cut())?;
        let end = at.checked_add(size_of::<ShimHeader>()).ok_or_else(cut)?;
        let mut bytes = self.bytes.get(at..end).ok_or_else(cut)?.to_vec();
        for &(offset, addend) in &self.relocations {
            let word = offset.checked_sub(self.header).and_then(|offset| {
                let offset = usize::try_from(offset).ok()?;
                bytes.get_mut(offset..offset.checked_add(8)?)
            });
            if let Some(word) = word {
                word.copy_from_slice(base.wrapping_add(addend).as_bytes());
            }
        }
        ShimHeader::read_from_bytes(&bytes).map_err(|_| cut())
    }

    /// The image's memory, relocated for `base`; zeros at its end are left out.
    ///
    /// # Errors
    /// When a relocation lies outside of it.
    pub fn placed_at(&self, base: u64) -> Result<Vec<u8>, ImageError> {
        let mut bytes = self.bytes.clone();
        for &(offset, addend) in &self.relocations {
            let at = offset as usize;
            let word = bytes
                .get_mut(at..at + 8)
                .ok_or(ImageError::Unusable("a relocation lies outside"))?;
            word.copy_from_slice(base.wrapping_add(addend).as_bytes());
        }
        Ok(bytes)
    }
}
