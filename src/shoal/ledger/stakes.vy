# pragma version 0.4.3
"""
The accounts of a pool on a chain: the rules of `shoal.ledger.stakes.Book`.
The operator, which is the coordinator's account, registers, credits and slashes. What is slashed stays in
the contract's pool: no function pays it to the operator. A key's stake is paid in and out by the account that the operator
registered for it, so nobody can block another's key. Before that anyone may deposit on a key; what the registered account
deposited becomes its stake, what others did they can take back.
"""

struct Account:
    role: String[16]
    payer: address
    stake: uint256
    leaving: uint256
    leaves_s: uint256
    credit: uint256

event Entry:
    seq: uint256
    kind: String[16]
    key: bytes32
    work: String[64]
    amount: uint256
    detail: bytes32

operator: public(address)
unstake_s: public(uint256)
accounts: public(HashMap[bytes32, Account])
deposits: public(HashMap[bytes32, HashMap[address, uint256]])
slashed: public(HashMap[String[64], bytes32])  # the key that was slashed for it
paid: public(HashMap[String[64], bool])
pool: public(uint256)
count: public(uint256)

@deploy
def __init__(unstake_s: uint256):
    self.operator = msg.sender
    self.unstake_s = unstake_s

@internal
def _entry(kind: String[16], key: bytes32, work: String[64], amount: uint256, detail: bytes32):
    self.count += 1
    log Entry(seq=self.count, kind=kind, key=key, work=work, amount=amount, detail=detail)

@internal
@view
def _operator():
    assert msg.sender == self.operator, "operator only"

@internal
@view
def _known(key: bytes32):
    assert len(self.accounts[key].role) > 0, "not registered"

@external
@payable
def deposit(key: bytes32):
    assert len(self.accounts[key].role) == 0, "registered already"
    assert msg.value > 0, "no amount"
    self.deposits[key][msg.sender] += msg.value
    self._entry("deposited", key, "", msg.value, empty(bytes32))

@external
def reclaim(key: bytes32):
    amount: uint256 = self.deposits[key][msg.sender]
    assert amount > 0, "nothing deposited"
    self.deposits[key][msg.sender] = 0
    self._entry("reclaimed", key, "", amount, empty(bytes32))
    send(msg.sender, amount)

@external
def register(key: bytes32, role: String[16], payer: address):
    self._operator()
    assert len(self.accounts[key].role) == 0, "registered already"
    assert len(role) > 0, "no role"
    self.accounts[key].role = role
    self.accounts[key].payer = payer
    amount: uint256 = self.deposits[key][payer]
    self.deposits[key][payer] = 0
    self.accounts[key].stake = amount
    self._entry("registered", key, role, amount, empty(bytes32))

@external
@payable
def stake(key: bytes32):
    self._known(key)
    assert msg.sender == self.accounts[key].payer, "payer only"
    assert msg.value > 0, "no amount"
    self.accounts[key].stake += msg.value
    self._entry("staked", key, "", msg.value, empty(bytes32))

@external
def unstake(key: bytes32, amount: uint256):
    self._known(key)
    assert msg.sender == self.accounts[key].payer, "payer only"
    assert amount > 0, "no amount"
    assert amount <= self.accounts[key].stake, "more than is at stake"
    self.accounts[key].stake -= amount
    self.accounts[key].leaving += amount
    self.accounts[key].leaves_s = block.timestamp + self.unstake_s
    self._entry("unstaked", key, "", amount, empty(bytes32))

@external
def withdraw(key: bytes32):
    self._known(key)
    payer: address = self.accounts[key].payer
    assert msg.sender == payer, "payer only"
    amount: uint256 = self.accounts[key].leaving
    assert amount > 0, "nothing to withdraw"
    assert block.timestamp >= self.accounts[key].leaves_s, "still at risk"
    self.accounts[key].leaving = 0
    self.accounts[key].leaves_s = 0
    self._entry("withdrawn", key, "", amount, empty(bytes32))
    send(payer, amount)

@external
def credit(key: bytes32, work: String[64], tokens: uint256):
    self._operator()
    self._known(key)
    assert len(work) > 0 and not self.paid[work], "credited already"
    self.paid[work] = True
    self.accounts[key].credit += tokens
    self._entry("credited", key, work, tokens, empty(bytes32))

@external
def slash(key: bytes32, work: String[64], evidence: bytes32):
    self._operator()
    self._known(key)
    assert len(work) > 0 and self.slashed[work] == empty(bytes32), "slashed for it already"
    amount: uint256 = self.accounts[key].stake + self.accounts[key].leaving
    self.accounts[key].stake = 0
    self.accounts[key].leaving = 0
    self.accounts[key].leaves_s = 0
    self.pool += amount
    self.slashed[work] = key
    self._entry("slashed", key, work, amount, evidence)
