//! The backing file below a directory's layers, beside that of another directory.
//!
//! Replicas are compared and brought in sync layer by layer, and nobody ever writes a backing file: where those of two replicas differ,
//! each answers reads with its own, and nothing mends it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lh_ring::sys;

use super::disk;
use super::error::{OpenError, damaged, failed};
use super::tree;

/// Bytes compared at a time.
const STEP: usize = 1 << 20;

/// A directory's backing file.
#[derive(Debug)]
pub struct BackingFile {
    path: PathBuf,
    file: File,
    length: u64,
    /// Device and inode.
    identity: (u64, u64),
}

/// In what two backing files differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingDifference {
    /// They are not as long as each other.
    Length(u64, u64),
    /// The first of the bytes in which they differ.
    Byte(u64),
}

impl BackingFile {
    /// That of a directory; `None` if its layers stand on nothing.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn of(directory: &Path) -> Result<Option<Self>, OpenError> {
        let named = tree::load(directory)?.volume.backing_file;
        if named.is_empty() {
            return Ok(None);
        }
        let path = disk::backing_path(directory, &named).map_err(|damage| damaged(directory, damage))?;
        let file = sys::open_plain(&path, OpenOptions::new().read(true), 0);
        let file = file.map_err(failed("opening", &path))?;
        let stat = file.metadata().map_err(failed("reading", &path))?;
        // As people would name it: what volume.meta has counts from the directory.
        let path = path.canonicalize().unwrap_or(path);
        Ok(Some(Self { file, length: stat.len(), identity: (stat.dev(), stat.ino()), path }))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// In what it differs from another one, if it does. One file by two names is not read. `progress`: bytes done, and in all.
    ///
    /// # Errors
    /// [`OpenError::Io`].
    pub fn difference(
        &self,
        other: &Self,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<BackingDifference>, OpenError> {
        if self.identity == other.identity {
            return Ok(None);
        }
        if self.length != other.length {
            return Ok(Some(BackingDifference::Length(self.length, other.length)));
        }
        let mut buffers = (vec![0; STEP], vec![0; STEP]);
        let mut at = 0;
        while at < self.length {
            progress(at, self.length);
            // Where both have a hole, both are zeroes.
            at = match (self.data_from(at)?, other.data_from(at)?) {
                (None, None) => break,
                (Some(data), None) | (None, Some(data)) => data,
                (Some(one), Some(two)) => one.min(two),
            };
            let (own, others) = (self.read(at, &mut buffers.0)?, other.read(at, &mut buffers.1)?);
            if let Some(place) = own.iter().zip(others).position(|(a, b)| a != b) {
                return Ok(Some(BackingDifference::Byte(at + place as u64)));
            }
            // One that somebody has cut off meanwhile.
            if own.len() != others.len() || own.is_empty() {
                return Ok(Some(BackingDifference::Byte(at + own.len().min(others.len()) as u64)));
            }
            at += own.len() as u64;
        }
        progress(self.length, self.length);
        Ok(None)
    }

    /// Where there is data at or behind `at`. A file system that cannot tell has data everywhere.
    fn data_from(&self, at: u64) -> Result<Option<u64>, OpenError> {
        match sys::seek_data(&self.file, at) {
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(Some(at)),
            found => found.map_err(failed("reading", &self.path)),
        }
    }

    fn read<'a>(&self, at: u64, buffer: &'a mut [u8]) -> Result<&'a [u8], OpenError> {
        let done = disk::read_up_to(&self.file, at, buffer).map_err(failed("reading", &self.path))?;
        Ok(&buffer[..done])
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::super::tests::{Volume, temporary};
    use super::*;

    const LENGTH: u64 = 40 * 4096;

    /// A replica directory, and beside it the backing file that it names.
    fn with_backing(place: &Path, name: &str) -> (PathBuf, File) {
        let (path, backing) = (place.join(name), place.join(format!("{name}.raw")));
        drop(Volume::create(&path));
        let meta = path.join("volume.meta");
        let named = format!("\"BackingFilePath\":\"../{name}.raw\"");
        let text = fs::read_to_string(&meta).unwrap().replacen("\"BackingFilePath\":\"\"", &named, 1);
        fs::write(&meta, text).unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(backing).unwrap();
        file.set_len(LENGTH).unwrap();
        (path, file)
    }

    #[test]
    fn two_backing_files_are_equal_byte_by_byte_or_one_file() {
        let place = temporary();
        let (one, file_of_one) = with_backing(place.path(), "one");
        let (two, file_of_two) = with_backing(place.path(), "two");
        let look = || {
            let [one, two] = [&one, &two].map(|path| BackingFile::of(path).unwrap().unwrap());
            let mut last = 0;
            let found = one.difference(&two, &mut |done, of| {
                assert!(last <= done && done <= of && of == LENGTH);
                last = done;
            });
            found.unwrap()
        };
        assert_eq!(look(), None, "holes");
        file_of_one.write_all_at(&[7; 4096], 4096).unwrap();
        assert_eq!(look(), Some(BackingDifference::Byte(4096)), "data over a hole");
        file_of_two.write_all_at(&[7; 4096], 4096).unwrap();
        file_of_two.write_all_at(&[0; 4096], 9 * 4096).unwrap();
        assert_eq!(look(), None, "zeroes over a hole are what the hole is");
        file_of_two.write_all_at(&[1], LENGTH - 1).unwrap();
        assert_eq!(look(), Some(BackingDifference::Byte(LENGTH - 1)));
        file_of_two.set_len(LENGTH - 512).unwrap();
        assert_eq!(look(), Some(BackingDifference::Length(LENGTH, LENGTH - 512)));
        fs::remove_file(place.path().join("two.raw")).unwrap();
        fs::hard_link(place.path().join("one.raw"), place.path().join("two.raw")).unwrap();
        assert_eq!(look(), None, "one file");
    }

    /// Longhorn's replicas see the host's files below `/host`; `volume.meta` keeps that name, for the way back.
    #[test]
    fn a_file_that_longhorn_has_named_below_host_is_found_where_the_host_has_it() {
        let place = temporary();
        let (path, file) = with_backing(place.path(), "one");
        file.write_all_at(&[7; 4096], 4096).unwrap();
        let raw = place.path().join("one.raw");
        // The only file of a directory, as Longhorn has them.
        let images = place.path().join("backing-images/image-0a1b2c3d");
        fs::create_dir_all(&images).unwrap();
        fs::rename(&raw, images.join("backing")).unwrap();
        let meta = path.join("volume.meta");
        let relative = fs::read_to_string(&meta).unwrap();
        assert!(!Path::new("/host").join(images.strip_prefix("/").unwrap()).exists());
        for named in [images.clone(), images.join("backing")] {
            let text = relative.replacen("../one.raw", &format!("/host{}", named.display()), 1);
            fs::write(&meta, &text).unwrap();
            let found = BackingFile::of(&path).unwrap().unwrap();
            assert_eq!(found.path(), images.join("backing").canonicalize().unwrap());
            drop(Volume::open(&path).unwrap());
            let kept = format!("\"BackingFilePath\":\"/host{}\"", named.display());
            assert!(fs::read_to_string(&meta).unwrap().contains(&kept));
        }
        fs::remove_file(images.join("backing")).unwrap();
        fs::write(&meta, relative.replacen("../one.raw", "/hosts/one.raw", 1)).unwrap();
        let refused = BackingFile::of(&path).unwrap_err().to_string();
        assert!(refused.contains("/hosts/one.raw"), "{refused}");
    }

    #[test]
    fn a_directory_may_have_none() {
        let place = temporary();
        drop(Volume::create(&place.path().join("r")));
        assert!(BackingFile::of(&place.path().join("r")).unwrap().is_none());
    }
}
