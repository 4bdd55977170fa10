//! Response codes of a TPM, in words.
//!
//! A code of format one says which handle, session or parameter of the command it is about. TPM 2.0 library, part 2,
//! section "TPM_RC".

use std::fmt;

/// Bit 7: the code has format one.
const FORMAT_ONE: u32 = 0x080;
/// Bit 8: the code is one of TPM 2.0.
const VERSION_2: u32 = 0x100;
/// Bit 10: the manufacturer defines the code.
const VENDOR: u32 = 0x400;
/// Bit 11: a state that may pass.
const WARNING: u32 = 0x800;

/// The response code of a command that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseCode(pub(crate) u32);

/// What of the command a code is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The command, or the state of the TPM.
    Command,
    /// The handle with this number, from 1.
    Handle(u8),
    /// The session with this number, from 1.
    Session(u8),
    /// The parameter with this number, from 1.
    Parameter(u8),
}

impl ResponseCode {
    /// TPM_RC_HANDLE, without its subject: nothing has this handle.
    pub const HANDLE: Self = Self(0x08b);
    /// TPM_RC_LOCKOUT: too many wrong authorizations.
    pub const LOCKOUT: Self = Self(0x921);
    /// TPM_RC_RETRY.
    pub const RETRY: Self = Self(0x922);
    /// TPM_RC_SIGNATURE, without its subject.
    pub const SIGNATURE: Self = Self(0x09b);

    /// The number that the TPM returned.
    pub fn number(self) -> u32 {
        self.0
    }

    /// What it is about.
    pub fn subject(self) -> Subject {
        let position = (self.0 >> 8 & 0xf) as u8;
        if self.0 & FORMAT_ONE == 0 || position == 0 {
            Subject::Command
        } else if self.0 & 0x40 != 0 {
            Subject::Parameter(position)
        } else if position & 0x8 != 0 {
            Subject::Session(position & 0x7)
        } else {
            Subject::Handle(position)
        }
    }

    /// The code without what it is about.
    pub fn kind(self) -> Self {
        if self.0 & FORMAT_ONE == 0 {
            self
        } else {
            Self(self.0 & (0x3f | FORMAT_ONE))
        }
    }

    /// Whether the same command can succeed when it is sent again: the TPM was busy, and has not executed it.
    pub fn is_transient(self) -> bool {
        // YIELDED, TESTING, NV_RATE, RETRY, NV_UNAVAILABLE.
        matches!(self.0, 0x908 | 0x90a | 0x920 | 0x922 | 0x923)
    }

    /// The specification's name and meaning.
    fn known(self) -> Option<(&'static str, &'static str)> {
        let kind = self.kind().0;
        let found = CODES.iter().find(|(number, _, _)| *number == kind);
        found.map(|(_, name, meaning)| (*name, *meaning))
    }
}

impl fmt::Display for ResponseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.subject() {
            Subject::Command => {}
            Subject::Handle(number) => write!(f, "handle {number}: ")?,
            Subject::Session(number) => write!(f, "session {number}: ")?,
            Subject::Parameter(number) => write!(f, "parameter {number}: ")?,
        }
        let number = self.0;
        match self.known() {
            Some((name, meaning)) => write!(f, "{meaning} (TPM_RC_{name}, {number:#05x})"),
            None if number & VENDOR != 0 && number & FORMAT_ONE == 0 => {
                write!(f, "a code of the manufacturer ({number:#05x})")
            }
            None if number & !0xfff != 0 => {
                write!(f, "an error of the software below ({number:#x})")
            }
            None if number & WARNING != 0 => write!(f, "an unknown warning ({number:#05x})"),
            None if number & (VERSION_2 | FORMAT_ONE) == 0 => {
                write!(f, "an error of TPM 1.2 ({number:#05x})")
            }
            None => write!(f, "an unknown error ({number:#05x})"),
        }
    }
}

/// Numbers without their subject, names without `TPM_RC_`, meanings.
#[rustfmt::skip]
const CODES: &[(u32, &str, &str)] = &[
    (0x100, "INITIALIZE", "the TPM was not started by the firmware"),
    (0x101, "FAILURE", "the TPM is in failure mode"),
    (0x103, "SEQUENCE", "improper use of a sequence"),
    (0x10b, "PRIVATE", "not used by TPM 2.0"),
    (0x119, "HMAC", "not used by TPM 2.0"),
    (0x120, "DISABLED", "the command is disabled"),
    (0x121, "EXCLUSIVE", "an exclusive audit session is needed"),
    (0x124, "AUTH_TYPE", "the handle does not have the right type for this authorization"),
    (0x125, "AUTH_MISSING", "the command needs an authorization that is missing"),
    (0x126, "POLICY", "the policy cannot be used here, or is not of this kind"),
    (0x127, "PCR", "PCR check failed"),
    (0x128, "PCR_CHANGED", "PCRs have changed since the policy was checked"),
    (0x12d, "UPGRADE", "the TPM is in field upgrade mode"),
    (0x12e, "TOO_MANY_CONTEXTS", "the counter of contexts is at its maximum"),
    (0x12f, "AUTH_UNAVAILABLE", "the authorization value or policy is not available"),
    (0x130, "REBOOT", "the TPM needs a reset"),
    (0x131, "UNBALANCED", "the algorithms are not balanced"),
    (0x142, "COMMAND_SIZE", "the size of the command does not match its content"),
    (0x143, "COMMAND_CODE", "the command is not supported"),
    (0x144, "AUTHSIZE", "the size of the authorization area is out of range"),
    (0x145, "AUTH_CONTEXT", "the command does not take this authorization"),
    (0x146, "NV_RANGE", "NV offset and size are out of range"),
    (0x147, "NV_SIZE", "the requested NV size is too large"),
    (0x148, "NV_LOCKED", "the NV index is locked"),
    (0x149, "NV_AUTHORIZATION", "NV access is not authorized"),
    (0x14a, "NV_UNINITIALIZED", "the NV index is not initialized, or the state could not be restored"),
    (0x14b, "NV_SPACE", "not enough NV space"),
    (0x14c, "NV_DEFINED", "the NV index or persistent object exists already"),
    (0x150, "BAD_CONTEXT", "the context is not valid"),
    (0x151, "CPHASH", "the hash of the command is set already, or not that of this command"),
    (0x152, "PARENT", "the handle is not that of a usable parent"),
    (0x153, "NEEDS_TEST", "a self-test is needed"),
    (0x154, "NO_RESULT", "a message is too long to be signed or encrypted"),
    (0x155, "SENSITIVE", "the sensitive area did not unmarshal after decryption"),
    (0x081, "ASYMMETRIC", "the asymmetric algorithm is not supported or not correct"),
    (0x082, "ATTRIBUTES", "inconsistent attributes"),
    (0x083, "HASH", "the hash algorithm is not supported or not appropriate"),
    (0x084, "VALUE", "the value is out of range or not correct here"),
    (0x085, "HIERARCHY", "the hierarchy is not enabled or not correct here"),
    (0x087, "KEY_SIZE", "the key size is not supported"),
    (0x088, "MGF", "the mask generation function is not supported"),
    (0x089, "MODE", "the mode of operation is not supported"),
    (0x08a, "TYPE", "the type of the value is not appropriate"),
    (0x08b, "HANDLE", "the handle is not correct here"),
    (0x08c, "KDF", "the key derivation function is not supported"),
    (0x08d, "RANGE", "the value is out of the allowed range"),
    (0x08e, "AUTH_FAIL", "the authorization failed, and counts against the lockout"),
    (0x08f, "NONCE", "invalid nonce"),
    (0x090, "PP", "physical presence is needed"),
    (0x092, "SCHEME", "the scheme is not supported or not compatible"),
    (0x095, "SIZE", "the size is wrong"),
    (0x096, "SYMMETRIC", "the symmetric algorithm is not supported"),
    (0x097, "TAG", "the tag of the structure is not correct"),
    (0x098, "SELECTOR", "the union selector is not correct"),
    (0x09a, "INSUFFICIENT", "the value ends too early"),
    (0x09b, "SIGNATURE", "the signature is not valid"),
    (0x09c, "KEY", "the key's fields are not compatible with its use"),
    (0x09d, "POLICY_FAIL", "the policy does not hold"),
    (0x09f, "INTEGRITY", "the integrity check failed"),
    (0x0a0, "TICKET", "the ticket is not valid"),
    (0x0a1, "RESERVED_BITS", "reserved bits are set"),
    (0x0a2, "BAD_AUTH", "the authorization failed"),
    (0x0a3, "EXPIRED", "the policy has expired"),
    (0x0a4, "POLICY_CC", "the policy is for another command"),
    (0x0a5, "BINDING", "public and sensitive areas do not belong together"),
    (0x0a6, "CURVE", "the curve is not supported"),
    (0x0a7, "ECC_POINT", "the point is not on the curve"),
    (0x901, "CONTEXT_GAP", "the gap between saved contexts is too large"),
    (0x902, "OBJECT_MEMORY", "no memory for another object"),
    (0x903, "SESSION_MEMORY", "no memory for another session"),
    (0x904, "MEMORY", "out of memory"),
    (0x905, "SESSION_HANDLES", "no handle for another session"),
    (0x906, "OBJECT_HANDLES", "no handle for another object"),
    (0x907, "LOCALITY", "bad locality"),
    (0x908, "YIELDED", "the TPM has suspended the command, which can be sent again"),
    (0x909, "CANCELED", "the command was canceled"),
    (0x90a, "TESTING", "the TPM is testing itself"),
    (0x910, "REFERENCE_H0", "the first handle refers to what is not loaded"),
    (0x911, "REFERENCE_H1", "the second handle refers to what is not loaded"),
    (0x912, "REFERENCE_H2", "the third handle refers to what is not loaded"),
    (0x918, "REFERENCE_S0", "the first session is not loaded"),
    (0x919, "REFERENCE_S1", "the second session is not loaded"),
    (0x91a, "REFERENCE_S2", "the third session is not loaded"),
    (0x920, "NV_RATE", "the TPM limits the rate of NV accesses"),
    (0x921, "LOCKOUT", "the TPM is locked out after too many wrong authorizations"),
    (0x922, "RETRY", "the TPM could not start the command, which can be sent again"),
    (0x923, "NV_UNAVAILABLE", "NV memory is not accessible now"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_say_what_they_are_about() {
        let cases = [
            (0x922, Subject::Command, "TPM_RC_RETRY"),
            (0x101, Subject::Command, "TPM_RC_FAILURE"),
            (0x1df, Subject::Parameter(1), "TPM_RC_INTEGRITY"),
            (0x99d, Subject::Session(1), "TPM_RC_POLICY_FAIL"),
            (0x28b, Subject::Handle(2), "TPM_RC_HANDLE"),
        ];
        for (number, subject, name) in cases {
            let code = ResponseCode(number);
            assert_eq!(code.subject(), subject, "{number:#x}");
            assert!(code.to_string().contains(name), "{code}");
        }
        assert_eq!(
            ResponseCode(0x1df).to_string(),
            "parameter 1: the integrity check failed (TPM_RC_INTEGRITY, 0x1df)"
        );
        assert_eq!(ResponseCode(0x2db).kind(), ResponseCode::SIGNATURE);
    }

    #[test]
    fn every_number_has_words() {
        for number in (0..=0xfff).chain([0x000b_0001, u32::MAX]) {
            assert!(!ResponseCode(number).to_string().is_empty());
        }
    }
}
