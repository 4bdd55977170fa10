//! One command and its response: framing, authorization, busy TPMs, and what is left loaded.
//!
//! The channel notes each object and session that a response says is loaded. [`Channel::release`] flushes them, whatever
//! has happened in between. After an error nobody knows how far the command came, so it asks the TPM what is loaded, and
//! flushes that. It does so before the first command as well: an emulator keeps what a client that was killed has left.

use std::time::Duration;
use std::{fmt, io};

use zeroize::Zeroizing;

use super::code::ResponseCode;
use super::session::{Secret, Session, SessionError};
use super::transport::Transport;
use super::wire::{MAX_SIZE, Malformed, Reader, Writer};

const NO_SESSIONS: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;

/// The handle of a session that carries a password, here always an empty one.
const PASSWORD: u32 = 0x4000_0009;

/// The first of the transient objects, and of the loaded sessions, for [`Command::GetCapability`].
const LOADED: [u32; 2] = [0x8000_0000, 0x0200_0000];

/// How often the TPM is asked for what is loaded, 64 handles at a time. No TPM has room for as many.
const ROUNDS: usize = 4;

/// A command of TPM 2.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the specification")]
#[repr(u32)]
pub enum Command {
    #[cfg(any(test, feature = "testing"))]
    Clear = 0x126,
    NvDefineSpace = 0x12a,
    CreatePrimary = 0x131,
    NvIncrement = 0x134,
    #[cfg(any(test, feature = "testing"))]
    NvWrite = 0x137,
    ActivateCredential = 0x147,
    NvRead = 0x14e,
    PolicySecret = 0x151,
    Create = 0x153,
    Load = 0x157,
    Quote = 0x158,
    Unseal = 0x15e,
    FlushContext = 0x165,
    LoadExternal = 0x167,
    NvReadPublic = 0x169,
    PolicyAuthorize = 0x16a,
    StartAuthSession = 0x176,
    VerifySignature = 0x177,
    GetCapability = 0x17a,
    GetRandom = 0x17b,
    PcrRead = 0x17e,
    PolicyPcr = 0x17f,
    #[cfg(any(test, feature = "testing"))]
    PcrExtend = 0x182,
    #[cfg(test)]
    PolicyGetDigest = 0x189,
}

impl Command {
    /// Whether the response has the handle of what was loaded.
    fn loads(self) -> bool {
        matches!(
            self,
            Self::CreatePrimary | Self::Load | Self::LoadExternal | Self::StartAuthSession
        )
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PcrRead => f.write_str("TPM2_PCR_Read"),
            Self::PolicyPcr => f.write_str("TPM2_PolicyPCR"),
            Self::NvDefineSpace => f.write_str("TPM2_NV_DefineSpace"),
            Self::NvIncrement => f.write_str("TPM2_NV_Increment"),
            Self::NvRead => f.write_str("TPM2_NV_Read"),
            Self::NvReadPublic => f.write_str("TPM2_NV_ReadPublic"),
            other => write!(f, "TPM2_{other:?}"),
        }
    }
}

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The TPM was not reached, or did not answer.
    #[error("{command}: {source}")]
    Transport {
        /// The command.
        command: Command,
        /// What the transport says.
        source: io::Error,
    },
    /// The TPM refused the command.
    #[error("{command}: {code}")]
    Tpm {
        /// The command.
        command: Command,
        /// The TPM's reason.
        code: ResponseCode,
    },
    /// The response does not have the format that it should have.
    #[error("{command}: response: {source}")]
    Response {
        /// The command.
        command: Command,
        /// What is wrong.
        source: Malformed,
    },
    /// The session does not protect the command.
    #[error("{command}: {source}")]
    Session {
        /// The command.
        command: Command,
        /// Why not.
        source: SessionError,
    },
}

impl Error {
    /// The TPM's reason, if the TPM refused the command.
    pub fn code(&self) -> Option<ResponseCode> {
        match self {
            Self::Tpm { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// How a busy TPM is waited for: after each refusal twice as long as before.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// The first pause.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// How many times a command is sent at most.
    pub attempts: u32,
}

impl Default for Retries {
    /// 15 seconds in all: self-tests of slow TPMs take some.
    fn default() -> Self {
        Self {
            first: Duration::from_millis(5),
            longest: Duration::from_millis(500),
            attempts: 36,
        }
    }
}

/// Who authorizes a command.
pub(crate) enum Authorization<'a> {
    /// The command needs none.
    None,
    /// The hierarchy or key of the first handle, by its empty password.
    EmptyPassword,
    /// The first handle's by its empty password, the second one's by the policy of a session, which ends with the command.
    PasswordAndPolicy(u32),
    /// A session, which ends with the command.
    Session {
        session: &'a Session,
        /// The names of what the handles are.
        names: &'a [&'a [u8]],
        secret: Secret,
    },
}

/// The content of a response.
pub(crate) struct Response {
    /// What was loaded.
    pub(crate) handle: u32,
    pub(crate) parameters: Zeroizing<Vec<u8>>,
}

/// The connection to a TPM.
pub(crate) struct Channel {
    transport: Box<dyn Transport>,
    retries: Retries,
    /// What has to be flushed, the oldest first.
    loaded: Vec<u32>,
    /// There may be more loaded than `loaded` says.
    is_unknown: bool,
}

impl Channel {
    pub(crate) fn new(transport: Box<dyn Transport>, retries: Retries) -> Self {
        Self {
            transport,
            retries,
            loaded: Vec::new(),
            is_unknown: true,
        }
    }

    /// Executes a command that nothing has to authorize.
    pub(crate) fn plain(
        &mut self,
        command: Command,
        handles: &[u32],
        parameters: Writer,
    ) -> Result<Response, Error> {
        self.execute(command, handles, parameters, Authorization::None)
    }

    /// Executes a command: its handles, its parameters, and who authorizes it.
    pub(crate) fn execute(
        &mut self,
        command: Command,
        handles: &[u32],
        parameters: Writer,
        authorization: Authorization<'_>,
    ) -> Result<Response, Error> {
        let ending = match &authorization {
            Authorization::Session { session, .. } => Some(session.handle),
            Authorization::PasswordAndPolicy(session) => Some(*session),
            _ => None,
        };
        let result = self.exchange(command, handles, parameters, authorization);
        match &result {
            Ok(response) if command.loads() => self.loaded.push(response.handle),
            Ok(_) => {}
            // Not even a refusal is certain: it may be a response that was changed on the way.
            Err(_) => self.is_unknown = true,
        }
        self.loaded.retain(|handle| Some(*handle) != ending);
        result
    }

    fn exchange(
        &mut self,
        command: Command,
        handles: &[u32],
        parameters: Writer,
        authorization: Authorization<'_>,
    ) -> Result<Response, Error> {
        let malformed = |source| Error::Response { command, source };
        let of_session = |source| Error::Session { command, source };
        let mut parameters = parameters.finish();
        let mut authorized = None;
        let area = match authorization {
            Authorization::None => None,
            Authorization::EmptyPassword => Some(without_hmac(&[PASSWORD])),
            Authorization::PasswordAndPolicy(session) => Some(without_hmac(&[PASSWORD, session])),
            Authorization::Session {
                session,
                names,
                secret,
            } => {
                let authorize = session.authorize(command as u32, names, &mut parameters, secret);
                let made = authorized.insert(authorize.map_err(of_session)?);
                Some(std::mem::take(&mut made.area))
            }
        };
        let request = frame(command, handles, area.as_deref(), &parameters);
        let response = self.transmit(command, &request)?;
        let split = Split::response(&response, command.loads(), area.is_some());
        let split = split.map_err(malformed)?;
        let mut parameters = Zeroizing::new(split.parameters.to_vec());
        if let Some(authorized) = authorized {
            let verified = authorized.verify(&mut parameters, split.area);
            verified.map_err(of_session)?;
        }
        Ok(Response {
            handle: split.handle,
            parameters,
        })
    }

    /// Sends a command until the TPM is not busy, and returns a successful response.
    fn transmit(&mut self, command: Command, request: &[u8]) -> Result<Vec<u8>, Error> {
        let mut pause = self.retries.first;
        let mut attempt = 1;
        loop {
            let response = self.transport.transmit(request);
            let response = response.map_err(|source| Error::Transport { command, source })?;
            let code = response_code(&response);
            let code = code.map_err(|source| Error::Response { command, source })?;
            if code.number() == 0 {
                return Ok(response);
            }
            if !code.is_transient() || attempt >= self.retries.attempts {
                return Err(Error::Tpm { command, code });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(self.retries.longest);
            attempt += 1;
        }
    }

    /// Unloads an object or a session.
    pub(crate) fn flush(&mut self, handle: u32) -> Result<(), Error> {
        self.plain(Command::FlushContext, &[], Writer::new().u32(handle))?;
        self.loaded.retain(|loaded| *loaded != handle);
        Ok(())
    }

    /// Flushes what is loaded. If that fails, [`Self::sweep`] does it before the next call.
    pub(crate) fn release(&mut self) {
        for handle in self.loaded.clone().into_iter().rev() {
            if self.is_unknown {
                break;
            }
            self.is_unknown = self.flush(handle).is_err();
        }
        let _ = self.sweep();
    }

    /// Flushes whatever is loaded, if that is not known to be nothing. With the kernel's resource manager, these are
    /// objects and sessions of this open file alone.
    pub(crate) fn sweep(&mut self) -> Result<(), Error> {
        if !self.is_unknown {
            return Ok(());
        }
        for first in LOADED {
            for _ in 0..ROUNDS {
                let (handles, more) = self.handles(first)?;
                handles.iter().try_for_each(|handle| self.flush(*handle))?;
                if !more {
                    break;
                }
            }
        }
        self.loaded.clear();
        self.is_unknown = false;
        Ok(())
    }

    /// The handles of what is loaded, from `first` on, and whether there are more.
    pub(crate) fn handles(&mut self, first: u32) -> Result<(Vec<u32>, bool), Error> {
        const HANDLES: u32 = 1;
        const AT_ONCE: u32 = 64;
        let command = Command::GetCapability;
        let parameters = Writer::new().u32(HANDLES).u32(first).u32(AT_ONCE);
        let response = self.plain(command, &[], parameters)?;
        let read = || {
            let mut reader = Reader::new(&response.parameters);
            let more = reader.u8("more data")? != 0;
            reader.expect("capability", &HANDLES.to_be_bytes())?;
            let count = reader.u32("number of handles")?;
            if count > AT_ONCE {
                let expected = format!("{AT_ONCE} at most");
                let error = Malformed::new("number of handles", expected, count.to_string());
                return Err(error);
            }
            let handles = (0..count)
                .map(|_| reader.u32("handle"))
                .collect::<Result<_, _>>()?;
            reader.end()?;
            Ok((handles, more))
        };
        read().map_err(|source| Error::Response { command, source })
    }
}

/// The authorization area of sessions that neither authenticate nor encrypt anything.
fn without_hmac(sessions: &[u32]) -> Vec<u8> {
    let area = sessions.iter().fold(Writer::new(), |area, handle| {
        area.u32(*handle).sized(&[]).u8(0).sized(&[])
    });
    area.finish().to_vec()
}

/// The bytes of a command.
fn frame(
    command: Command,
    handles: &[u32],
    area: Option<&[u8]>,
    parameters: &[u8],
) -> Zeroizing<Vec<u8>> {
    let body = handles
        .iter()
        .fold(Writer::new(), |body, handle| body.u32(*handle));
    let (tag, body) = match area {
        None => (NO_SESSIONS, body),
        Some(area) => (SESSIONS, body.u32(size(area.len())).bytes(area)),
    };
    let body = body.bytes(parameters).finish();
    let header = Writer::new().u16(tag).u32(size(10 + body.len()));
    header.u32(command as u32).bytes(&body).finish()
}

fn size(length: usize) -> u32 {
    u32::try_from(length).expect("commands have 4096 bytes at most")
}

/// The code in a response, whose size is checked.
fn response_code(response: &[u8]) -> Result<ResponseCode, Malformed> {
    if response.len() > MAX_SIZE {
        let expected = format!("{MAX_SIZE} bytes at most");
        return Err(Malformed::new("size", expected, response.len().to_string()));
    }
    let mut reader = Reader::new(response);
    reader.u16("tag")?;
    reader.expect("size", &size(response.len()).to_be_bytes())?;
    reader.u32("code").map(ResponseCode)
}

/// The parts of a successful response.
struct Split<'a> {
    handle: u32,
    parameters: &'a [u8],
    /// The authorization area; empty without sessions.
    area: &'a [u8],
}

impl<'a> Split<'a> {
    fn response(
        response: &'a [u8],
        has_handle: bool,
        has_sessions: bool,
    ) -> Result<Self, Malformed> {
        let tag = if has_sessions { SESSIONS } else { NO_SESSIONS };
        let mut reader = Reader::new(response);
        reader.expect("tag", &tag.to_be_bytes())?;
        reader.bytes("size and code", 8)?;
        let handle = if has_handle { reader.u32("handle")? } else { 0 };
        if !has_sessions {
            return Ok(Self {
                handle,
                parameters: reader.rest(),
                area: &[],
            });
        }
        let size = reader.u32("size of the parameters")?;
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        Ok(Self {
            handle,
            parameters: reader.bytes("parameters", size)?,
            area: reader.rest(),
        })
    }
}
