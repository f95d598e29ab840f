//! A blocking initiator that sends whatever it is told.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use iscsi_frontend::pdu::{
    Basic, DataIn, DataOut, FINAL, HEADER, LoginRequest, LoginResponse, LogoutRequest, NO_TAG, R2t, Raw,
    ScsiCommand, ScsiResponse, TaskRequest, flag, opcode,
};
use zerocopy::IntoBytes;

use super::Running;

/// A PDU that has come.
#[derive(Clone, Debug)]
pub struct Pdu {
    pub raw: Raw,
    pub data: Vec<u8>,
}

impl Pdu {
    pub fn code(&self) -> u8 {
        self.raw[0] & 0x3f
    }

    /// Four bytes of the header.
    pub fn u32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.raw[at..at + 4].try_into().unwrap())
    }

    pub fn itt(&self) -> u32 {
        self.u32_at(16)
    }
}

/// How a command has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub itt: u32,
    pub status: u8,
    pub data: Vec<u8>,
    /// Sense key and code.
    pub sense: Option<(u8, u16)>,
    /// Flags of residuals and their count.
    pub residual: (u8, u32),
    /// Sequences of R2T.
    pub r2ts: u32,
    /// Data-In PDUs.
    pub data_ins: u32,
}

pub struct Client {
    pub stream: TcpStream,
    pub header_digest: bool,
    pub data_digest: bool,
    pub cmd_sn: u32,
    pub itt: u32,
    pub max_cmd_sn: u32,
    /// The unit that task management is about.
    pub lun: u8,
    pub tsih: u16,
    /// The target transfer tag of the next text.
    pub ttt: u32,
    /// Text of the login's answer.
    pub text: String,
}

/// Keys of a login besides names.
pub const PLAIN: &str = "MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0";

/// The begin of a login request, whose text follows.
pub fn login_request(isid: u8, flags: u8, len: usize) -> LoginRequest {
    let [_, length @ ..] = u32::try_from(len).unwrap().to_be_bytes();
    LoginRequest {
        opcode: 0x43,
        flags,
        data: length,
        isid: [0x40, 0, 0, 0, 0, isid],
        itt: 1.into(),
        cmd_sn: 1.into(),
        ..LoginRequest::default()
    }
}

impl Client {
    /// Logs in to the disk.
    pub fn login(server: &Running, isid: u8, keys: &str) -> Self {
        Self::try_login(server, isid, keys).expect("admitted")
    }

    /// The same; the status if it is refused.
    pub fn try_login(server: &Running, isid: u8, keys: &str) -> Result<Self, u16> {
        let text = format!("InitiatorName=iqn.test\0TargetName={}\0{keys}", server.name);
        Self::over(server.connect(), isid, &text)
    }

    pub fn over(stream: TcpStream, isid: u8, text: &str) -> Result<Self, u16> {
        Self::with(stream, login_request(isid, 0x87, text.len()), text)
    }

    /// Logs in to a session that is there, as this connection of it.
    pub fn join(server: &Running, isid: u8, tsih: u16, cid: u16, keys: &str) -> Result<Self, u16> {
        let text = format!("InitiatorName=iqn.test\0TargetName={}\0{keys}", server.name);
        let request = login_request(isid, 0x87, text.len());
        Self::with(server.connect(), LoginRequest { tsih: tsih.into(), cid: cid.into(), ..request }, &text)
    }

    fn with(stream: TcpStream, request: LoginRequest, text: &str) -> Result<Self, u16> {
        let mut client = Self {
            stream,
            header_digest: false,
            data_digest: false,
            cmd_sn: 1,
            itt: 1,
            max_cmd_sn: 0,
            lun: 1,
            tsih: 0,
            ttt: NO_TAG,
            text: String::new(),
        };
        client.send(request.as_bytes(), text.as_bytes()).unwrap();
        client.finish_login()
    }

    /// Reads the last answer of a login.
    pub fn finish_login(mut self) -> Result<Self, u16> {
        let answer = self.recv().map_err(|_| 0xffff_u16)?;
        let header: LoginResponse = zerocopy::transmute!(answer.raw);
        if header.status.get() != 0 {
            return Err(header.status.get());
        }
        assert_eq!(header.flags & 0x83, 0x83, "not over yet");
        self.text = String::from_utf8(answer.data).unwrap();
        self.header_digest = self.text.contains("HeaderDigest=CRC32C");
        self.data_digest = self.text.contains("DataDigest=CRC32C");
        (self.tsih, self.max_cmd_sn) = (header.tsih.get(), header.max_cmd_sn.get());
        Ok(self)
    }

    /// A PDU as bytes, with padding and digests.
    pub fn encode(&self, header: &[u8], data: &[u8]) -> Vec<u8> {
        let mut bytes = header.to_vec();
        if self.header_digest {
            bytes.extend_from_slice(&crc32c::crc32c(header).to_le_bytes());
        }
        let mut body = data.to_vec();
        body.resize(data.len().next_multiple_of(4), 0);
        bytes.extend_from_slice(&body);
        if self.data_digest && !data.is_empty() {
            bytes.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        }
        bytes
    }

    pub fn send(&mut self, header: &[u8], data: &[u8]) -> io::Result<()> {
        let bytes = self.encode(header, data);
        self.stream.write_all(&bytes)
    }

    /// Reads a PDU and checks its digests.
    pub fn recv(&mut self) -> io::Result<Pdu> {
        let mut raw = [0; HEADER];
        self.stream.read_exact(&mut raw)?;
        let mut digest = [0; 4];
        if self.header_digest {
            self.stream.read_exact(&mut digest)?;
            assert_eq!(crc32c::crc32c(&raw).to_le_bytes(), digest, "header digest");
        }
        let len = Basic::of(&raw).data_len();
        let mut data = vec![0; len.next_multiple_of(4)];
        self.stream.read_exact(&mut data)?;
        if self.data_digest && len > 0 {
            self.stream.read_exact(&mut digest)?;
            assert_eq!(crc32c::crc32c(&data).to_le_bytes(), digest, "data digest");
        }
        data.truncate(len);
        let pdu = Pdu { raw, data };
        if pdu.code() != opcode::LOGIN_RESPONSE {
            self.max_cmd_sn = pdu.u32_at(32);
        }
        Ok(pdu)
    }

    /// The header of a command with `len` bytes of data in its PDU.
    pub fn command(&mut self, cdb: &[u8], flags: u8, expected: u32, len: usize) -> ScsiCommand {
        let mut padded = [0; 16];
        padded[..cdb.len()].copy_from_slice(cdb);
        let [_, length @ ..] = u32::try_from(len).unwrap().to_be_bytes();
        self.itt += 1;
        let command = ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags,
            data: length,
            lun: (1 << 48).into(),
            itt: self.itt.into(),
            expected: expected.into(),
            cmd_sn: self.cmd_sn.into(),
            cdb: padded,
            ..ScsiCommand::default()
        };
        self.cmd_sn += 1;
        command
    }

    /// Sends a command without data; its tag.
    pub fn start(&mut self, cdb: &[u8], flags: u8, expected: u32) -> u32 {
        let command = self.command(cdb, flags, expected, 0);
        self.send(command.as_bytes(), b"").unwrap();
        self.itt
    }

    /// Sends a write with its data in the PDU; its tag.
    pub fn start_write(&mut self, cdb: &[u8], data: &[u8]) -> u32 {
        let len = u32::try_from(data.len()).unwrap();
        let command = self.command(cdb, FINAL | flag::WRITE, len, data.len());
        self.send(command.as_bytes(), data).unwrap();
        self.itt
    }

    /// Reads up to a command's answer; R2Ts are served from `data`.
    pub fn answer(&mut self, data: &[u8]) -> Answer {
        let mut answer = Answer::default();
        loop {
            let pdu = self.recv().unwrap();
            match pdu.code() {
                opcode::DATA_IN => {
                    let header: DataIn = zerocopy::transmute!(pdu.raw);
                    assert_eq!(header.offset.get() as usize, answer.data.len());
                    assert_eq!(header.data_sn.get(), answer.data_ins);
                    answer.data.extend_from_slice(&pdu.data);
                    answer.data_ins += 1;
                    if header.flags & flag::STATUS != 0 {
                        answer.itt = header.itt.get();
                        answer.status = header.status;
                        answer.residual = (header.flags & 6, header.residual.get());
                        return answer;
                    }
                }
                opcode::R2T => {
                    let header: R2t = zerocopy::transmute!(pdu.raw);
                    answer.r2ts += 1;
                    let (from, len) = (header.offset.get() as usize, header.length.get() as usize);
                    self.data_out(
                        header.itt.get(),
                        header.ttt.get(),
                        from,
                        &data[from..from + len],
                        32 << 10,
                    );
                }
                opcode::SCSI_RESPONSE => {
                    let header: ScsiResponse = zerocopy::transmute!(pdu.raw);
                    answer.itt = header.itt.get();
                    answer.status = header.status;
                    answer.residual = (header.flags & 6, header.residual.get());
                    let code = |b: &[u8]| (b[4] & 0xf, u16::from_be_bytes([b[14], b[15]]));
                    answer.sense = (!pdu.data.is_empty()).then(|| code(&pdu.data));
                    return answer;
                }
                other => panic!("operation {other:#x}"),
            }
        }
    }

    /// Sends Data-Out PDUs of at most `piece` bytes.
    pub fn data_out(&mut self, itt: u32, ttt: u32, offset: usize, data: &[u8], piece: usize) {
        let count = data.len().div_ceil(piece);
        for (i, part) in data.chunks(piece).enumerate() {
            let [_, length @ ..] = u32::try_from(part.len()).unwrap().to_be_bytes();
            let header = DataOut {
                opcode: opcode::DATA_OUT,
                flags: if i + 1 == count { FINAL } else { 0 },
                data: length,
                lun: (1 << 48).into(),
                itt: itt.into(),
                ttt: ttt.into(),
                data_sn: u32::try_from(i).unwrap().into(),
                offset: u32::try_from(offset + i * piece).unwrap().into(),
                ..DataOut::default()
            };
            self.send(header.as_bytes(), part).unwrap();
        }
    }

    /// Does away with the attention of a new session.
    pub fn ready(&mut self) {
        self.start(&[0; 6], FINAL, 0);
        assert_eq!(self.answer(b"").sense, Some((6, 0x2900)));
    }

    pub fn read(&mut self, block: u32, blocks: u16) -> Answer {
        self.start(&rw10(0x28, block, blocks), FINAL | flag::READ, u32::from(blocks) * 512);
        self.answer(b"")
    }

    /// Writes, with as much data in the command as `immediate` says.
    pub fn write(&mut self, block: u32, data: &[u8], immediate: usize) -> Answer {
        let blocks = u16::try_from(data.len() / 512).unwrap();
        let len = u32::try_from(data.len()).unwrap();
        let now = &data[..immediate.min(data.len())];
        let command = self.command(&rw10(0x2a, block, blocks), FINAL | flag::WRITE, len, now.len());
        self.send(command.as_bytes(), now).unwrap();
        self.answer(data)
    }

    /// Sends a task management function, immediately; its tag.
    pub fn function(&mut self, function: u8, referenced: u32) -> u32 {
        self.itt += 1;
        let request = TaskRequest {
            opcode: opcode::TASK_REQUEST | 0x40,
            function: 0x80 | function,
            lun: (u64::from(self.lun) << 48).into(),
            itt: self.itt.into(),
            referenced: referenced.into(),
            cmd_sn: self.cmd_sn.into(),
            ..TaskRequest::default()
        };
        self.send(request.as_bytes(), b"").unwrap();
        self.itt
    }

    /// Sends a request of the shape of text: NOP-Out, text, logout.
    pub fn simple(&mut self, code: u8, flags: u8, data: &[u8]) -> u32 {
        let [_, length @ ..] = u32::try_from(data.len()).unwrap().to_be_bytes();
        self.itt += 1;
        let mut header = [0; HEADER];
        (header[0], header[1]) = (code, flags);
        header[5..8].copy_from_slice(&length);
        header[16..20].copy_from_slice(&self.itt.to_be_bytes());
        if code != opcode::LOGOUT_REQUEST {
            header[20..24].copy_from_slice(&self.ttt.to_be_bytes());
        }
        header[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
        self.cmd_sn += 1;
        self.send(&header, data).unwrap();
        self.itt
    }

    /// Asks for a logout: for what reason, and of which connection. The response.
    pub fn logout(&mut self, reason: u8, cid: u16) -> u8 {
        self.itt += 1;
        let request = LogoutRequest {
            opcode: opcode::LOGOUT_REQUEST,
            reason: FINAL | reason,
            itt: self.itt.into(),
            cid: cid.into(),
            cmd_sn: self.cmd_sn.into(),
            ..LogoutRequest::default()
        };
        self.cmd_sn += 1;
        self.send(request.as_bytes(), b"").unwrap();
        let answer = self.recv().unwrap();
        assert_eq!((answer.code(), answer.itt()), (opcode::LOGOUT_RESPONSE, self.itt));
        answer.raw[2]
    }

    /// True if the server has closed the connection, now or soon. What it still had to say is passed over.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = [0; 4096];
        loop {
            match self.stream.read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return !matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
            }
        }
    }
}

/// The CDB of a READ (10) or WRITE (10).
pub fn rw10(opcode: u8, block: u32, blocks: u16) -> [u8; 10] {
    let ([a, b, c, d], [x, y]) = (block.to_be_bytes(), blocks.to_be_bytes());
    [opcode, 0, a, b, c, d, 0, x, y, 0]
}
