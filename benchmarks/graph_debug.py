import sys, torch, warnings
warnings.simplefilter("ignore")
import gradvac
from gradvac.gradients import _tokens, _attachment, _site
import gpu_checks as g
v=sys.argv[1]
if v=="nohooks": _attachment.Attachment._leak_hook=lambda self,p: (lambda grad: None); torch.Tensor.register_hook=lambda self,h: type("H",(),{"remove":lambda s:None})()
if v=="notokens": _site.Site.tokens=property(lambda self: [])
if v=="sum": gradvac.GradVac=lambda **k: gradvac.Sum()
if v=="renew":
    def renew(self): self._made={}
    _tokens.Tokens.renew=renew
try:
    g.steps("one_backward","float32",graph=True); print(v,"OK")
except Exception as e: print(v,type(e),str(e)[:60], str(e.__context__)[:80])
