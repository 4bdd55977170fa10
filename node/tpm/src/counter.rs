//! A counter in the TPM that only goes up: by it, a disk that went back in time is told from the right one.
//!
//! It is an NV index with the attribute of a counter, in the owner's range. A new one begins above every counter that the
//! TPM ever had, so deleting it takes nothing back. Whoever may use the TPM can count, which makes the disk look old; none can
//! count down. Clearing the TPM removes it, and with it the keys that the TPM has sealed.

use super::channel::{Authorization, Channel, Command, Error};
use super::code::ResponseCode;
use super::commands::{OWNER, read};
use super::pcr::SHA256;
use super::tpm::Tpm;
use super::wire::{Reader, Writer};

/// In the range of the owner, where no other index of the TCG's registry is.
const INDEX: u32 = 0x0180_4854;
/// TPMA_NV: read and counted by whoever knows its empty authorization value, which is not guessed (noDA); a counter.
const ATTRIBUTES: u32 = 1 << 2 | 1 << 4 | 1 << 18 | 1 << 25;
/// TPM_RC_NV_UNINITIALIZED: it was never counted.
const UNINITIALIZED: ResponseCode = ResponseCode(0x14a);

impl Tpm {
    /// The value of the counter; `None` if there is none yet.
    pub fn counter(&mut self) -> Result<Option<u64>, Error> {
        self.call(Channel::counter)
    }

    /// Counts, and returns the new value. Makes the counter if there is none.
    pub fn count(&mut self) -> Result<u64, Error> {
        self.call(|channel| {
            if channel.has_counter()? {
                channel.increment()?;
            } else {
                channel.define_counter()?;
                channel.increment()?;
            }
            channel.read_counter()
        })
    }
}

impl Channel {
    fn has_counter(&mut self) -> Result<bool, Error> {
        match self.plain(Command::NvReadPublic, &[INDEX], Writer::new()) {
            Ok(_) => Ok(true),
            Err(error) if error.code().map(ResponseCode::kind) == Some(ResponseCode::HANDLE) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn counter(&mut self) -> Result<Option<u64>, Error> {
        if !self.has_counter()? {
            return Ok(None);
        }
        match self.read_counter() {
            Ok(value) => Ok(Some(value)),
            // The power was cut before it was counted for the first time.
            Err(error) if error.code() == Some(UNINITIALIZED) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn define_counter(&mut self) -> Result<(), Error> {
        let public = Writer::new().u32(INDEX).u16(SHA256).u32(ATTRIBUTES);
        let public = public.sized(&[]).u16(8).finish();
        let parameters = Writer::new().sized(&[]).sized(&public);
        let password = Authorization::EmptyPassword;
        self.execute(Command::NvDefineSpace, &[OWNER], parameters, password)?;
        Ok(())
    }

    fn increment(&mut self) -> Result<(), Error> {
        let password = Authorization::EmptyPassword;
        let handles = [INDEX, INDEX];
        self.execute(Command::NvIncrement, &handles, Writer::new(), password)?;
        Ok(())
    }

    fn read_counter(&mut self) -> Result<u64, Error> {
        let command = Command::NvRead;
        let parameters = Writer::new().u16(8).u16(0);
        let password = Authorization::EmptyPassword;
        let response = self.execute(command, &[INDEX, INDEX], parameters, password)?;
        read(command, || {
            let mut reader = Reader::new(&response.parameters);
            let bytes = reader.sized("counter", 8)?;
            reader.end()?;
            Ok(u64::from_be_bytes(Reader::new(bytes).array("counter")?))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::Swtpm;

    #[test]
    fn a_counter_only_goes_up() {
        let mut swtpm = Swtpm::start();
        assert_eq!(swtpm.tpm().counter().unwrap(), None);
        let first = swtpm.tpm().count().unwrap();
        assert_eq!(swtpm.tpm().counter().unwrap(), Some(first));
        assert_eq!(swtpm.tpm().count().unwrap(), first + 1);
        // A power cut.
        swtpm.restart();
        assert_eq!(swtpm.tpm().counter().unwrap(), Some(first + 1));
        assert_eq!(swtpm.tpm().count().unwrap(), first + 2);
        // Clearing the TPM takes it away, and the next one begins above it.
        swtpm.tpm().clear();
        assert_eq!(swtpm.tpm().counter().unwrap(), None);
        assert!(swtpm.tpm().count().unwrap() > first + 2);
    }

    #[test]
    fn a_counter_that_was_made_and_not_counted_is_none() {
        let swtpm = Swtpm::start();
        let mut tpm = swtpm.tpm();
        tpm.call(super::Channel::define_counter).unwrap();
        assert_eq!(tpm.counter().unwrap(), None);
        let first = tpm.count().unwrap();
        assert_eq!(tpm.counter().unwrap(), Some(first));
    }
}
