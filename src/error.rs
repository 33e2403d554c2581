//! The one error type: what was wanted, what was seen, and whose fault it is.

use std::borrow::Cow;
use std::fmt::Display;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Who has to act on an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call was wrong: fix the caller. It changed nothing, unless its documentation says otherwise.
    Misuse,
    /// The request is sensible, but this build, backend or checkpoint dialect cannot serve it.
    Unsupported,
    /// A file, a peer, the machine or the model's numbers are at fault.
    Fault,
}

impl Display for ErrorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Misuse => "misuse",
            Self::Unsupported => "unsupported",
            Self::Fault => "fault",
        })
    }
}

/// A failed call. It names its subject, what was wanted of it and what was seen instead.
///
/// ```
/// use eagle_verify::{DraftBudget, ErrorKind};
///
/// let error = DraftBudget::new(8, 5, 257).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Misuse);
/// assert_eq!(error.subject(), "node budget");
/// assert_eq!(error.to_string(), "misuse: node budget: wanted 1..=256 nodes, seen 257");
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: {}: wanted {}, seen {}", .0.kind, .0.subject, .0.wanted, .0.seen)]
pub struct Error(Box<Repr>);

#[derive(Clone, Debug)]
struct Repr {
    kind: ErrorKind,
    subject: Cow<'static, str>,
    wanted: String,
    seen: String,
}

impl Error {
    pub(crate) fn misuse(
        subject: impl Into<Cow<'static, str>>,
        wanted: impl Display,
        seen: impl Display,
    ) -> Self {
        Self::new(ErrorKind::Misuse, subject.into(), wanted, seen)
    }

    pub(crate) fn unsupported(
        subject: impl Into<Cow<'static, str>>,
        wanted: impl Display,
        seen: impl Display,
    ) -> Self {
        Self::new(ErrorKind::Unsupported, subject.into(), wanted, seen)
    }

    pub(crate) fn fault(
        subject: impl Into<Cow<'static, str>>,
        wanted: impl Display,
        seen: impl Display,
    ) -> Self {
        Self::new(ErrorKind::Fault, subject.into(), wanted, seen)
    }

    /// The same error as others hear of it: it happened at `place`.
    pub(crate) fn elsewhere(&self, place: impl Display) -> Self {
        let mut error = self.clone();
        error.0.subject = format!("{} of {place}", self.0.subject).into();
        error
    }

    fn new(kind: ErrorKind, subject: Cow<'static, str>, wanted: impl Display, seen: impl Display) -> Self {
        let (wanted, seen) = (wanted.to_string(), seen.to_string());
        Self(Box::new(Repr { kind, subject, wanted, seen }))
    }

    /// Whether to fix the call, use something else, or look at the machine and its files.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What the error is about: an argument's name, a tensor's name, a file's path.
    pub fn subject(&self) -> &str {
        &self.0.subject
    }

    /// What the crate needed of the subject.
    pub fn wanted(&self) -> &str {
        &self.0.wanted
    }

    /// What it got.
    pub fn seen(&self) -> &str {
        &self.0.seen
    }
}

/// `Err(misuse)` unless `seen == wanted`: the check that every buffer length goes through.
pub(crate) fn expect_len(subject: &'static str, wanted: usize, seen: usize) -> Result<()> {
    if wanted == seen { Ok(()) } else { Err(Error::misuse(subject, wanted, seen)) }
}

const _: () = {
    const fn shared<T: Send + Sync + 'static>() {}
    shared::<Error>();
};
